"""A whole beam search on the device: prefill, then a loop of decode steps and permutations of the page table.

Prompt p has the rows p · beams … p · beams + beams − 1 of the cache.  Its first row alone reads it; the permutation
after the first step hands its pages to the others.  From then on every step reserves a position for each beam, which
copies a tail page where beams that shared it part, and ends with one `kvjax.reorder`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, PyTree

import kvjax
from kvjax.cache import KVCache
from kvjax.engine.beam_rules import extend, start_beams
from kvjax.engine.beam_state import Prompts, Rules, Search
from kvjax.engine.steps import Log, next_logits
from kvjax.models.protocol import Model
from kvjax.pages.status import Status


def beam_search(
    model: Model,
    chunk: int,
    parameters: PyTree[Array],
    cache: KVCache,
    prompts: Prompts,
    rules: Rules,
    *,
    num_beams: int,
) -> tuple[KVCache, Search]:
    """Searches all prompts to their end, without a word from the host.

    A step in which not all can have their pages costs the last of the refused prompts its place: it ends with the
    status of the refusal and its pages serve the others, which lose nothing.

    Args:
      model, parameters: the model.
      chunk: prompt tokens computed in one step.
      cache: with the first prompts · num_beams rows empty; donate it.  They are empty again at the end.
      prompts: the prompts.
      rules: the options.
      num_beams: beams a prompt.

    Cost: a decode step is a forward of prompts · num_beams tokens, and O(pages that the rows map) for the permutation.
    """
    number, width = prompts.tokens.shape
    max_pages = number * num_beams * max(-(-(width + rules.max_tokens) // g.page_size) for g in cache.table.groups)
    # Every step brings each live prompt a token, or costs a prompt its place.
    max_steps = rules.max_tokens + number
    # So does every step that reads: a whole chunk, or the last of the prompts.
    max_logged = max_steps + number * width // chunk + 1 + number
    nothing = jnp.zeros((max_logged, cache.rows), jnp.int32)
    last = jnp.take_along_axis(prompts.tokens, prompts.length[:, None] - 1, axis=1)
    begin = Search(
        beams=start_beams(jnp.ones(number, bool), num_beams, rules.max_tokens),
        token=jnp.broadcast_to(last, (number, num_beams)),
        status=jnp.full(number, Status.OK, jnp.int32),
        steps=jnp.int32(0),
        held=jnp.zeros(max_steps, jnp.int32),
        mapped=jnp.zeros(max_steps, jnp.int32),
        copies=jnp.int32(0),
        log=Log(jnp.int32(0), nothing, nothing, nothing),
    )

    def read(state: tuple[KVCache, Search]) -> tuple[KVCache, Search]:
        return _prefill_step(model, chunk, max_pages, parameters, *state, prompts)

    def decode(state: tuple[KVCache, Search]) -> tuple[KVCache, Search]:
        return _decode_step(model, max_pages, parameters, *state, rules)

    state = lax.while_loop(lambda state: jnp.any(_unread(*state, prompts) > 0), read, (cache, begin))
    return lax.while_loop(lambda state: jnp.any(state[1].beams.live), decode, state)


def _unread(cache: KVCache, search: Search, prompts: Prompts) -> Int32[Array, " prompts"]:
    """Tokens of each prompt to prefill; the last is left to the first decode step, which needs its logits."""
    number, num_beams = search.token.shape
    read = cache.table.length[: number * num_beams : num_beams]
    return jnp.where(search.beams.live, prompts.length - 1 - read, 0)


def _prefill_step(
    model: Model,
    chunk: int,
    max_pages: int,
    parameters: PyTree[Array],
    cache: KVCache,
    search: Search,
    prompts: Prompts,
) -> tuple[KVCache, Search]:
    """Computes the next `chunk` tokens of the prompts, one prompt after another."""
    number, num_beams = search.token.shape
    unread = _unread(cache, search, prompts)
    share = jnp.clip(chunk - (jnp.cumsum(unread) - unread), 0, unread)
    first = jnp.arange(number, dtype=jnp.int32) * num_beams
    counts = jnp.zeros(cache.rows, jnp.int32).at[first].set(share)
    cache, grant = kvjax.reserve(kvjax.advance(cache), counts, max_tokens=chunk)
    tokens = prompts.tokens.at[grant.row // num_beams, grant.position].get(mode="fill", fill_value=0)
    _, cache = model.forward(parameters, cache, grant, tokens)
    cache = kvjax.commit(cache, grant.tokens)
    search = _give_way(search, grant.status)
    return _permute(cache, search, _themselves(search), max_pages, counts, grant.tokens)


def _decode_step(
    model: Model, max_pages: int, parameters: PyTree[Array], cache: KVCache, search: Search, rules: Rules
) -> tuple[KVCache, Search]:
    """One token for every beam of every live prompt whose beams all get their pages."""
    beams = search.beams
    number, num_beams = search.token.shape
    used = number * num_beams
    # Before its first step a prompt is in its first row only.
    asking = beams.live[:, None] & ((beams.length > 0)[:, None] | (jnp.arange(num_beams) == 0))
    counts = jnp.zeros(cache.rows, jnp.int32).at[:used].set(asking.reshape(used))
    cache, grant = kvjax.reserve(kvjax.advance(cache), counts, max_tokens=used)
    held, mapped = _pages(cache)

    tokens = search.token.reshape(used).at[grant.row].get(mode="fill", fill_value=0)
    hidden, cache = model.forward(parameters, cache, grant, tokens)
    cache, hidden = kvjax.after(cache, hidden)
    served = beams.live & jnp.all(grant.tokens[:used].reshape(number, num_beams) == asking, axis=1)
    # What a part of a prompt's beams was granted stays reserved, and is asked for again in the next step.
    granted = jnp.where(jnp.repeat(served, num_beams), grant.tokens[:used], 0)
    committed = jnp.zeros_like(counts).at[:used].set(granted)
    cache = kvjax.commit(cache, committed)
    logits = next_logits(model, parameters, grant, hidden, grant.last[:used])

    extended, parent = extend(beams, logits.reshape(number, num_beams, -1), rules)
    latest = jnp.take_along_axis(extended.tokens, extended.length[:, None, None] - 1, axis=2)[..., 0]
    search = Search(
        beams=_where(served, extended, beams),
        token=_where(served, latest, search.token),
        status=search.status,
        steps=search.steps + 1,
        held=search.held.at[search.steps].set(held),
        mapped=search.mapped.at[search.steps].set(mapped),
        copies=search.copies + grant.copies,
        log=search.log,
    )
    search = _give_way(search, grant.status)
    return _permute(cache, search, _where(served, parent, _themselves(search)), max_pages, counts, committed)


def _give_way(search: Search, status: Int32[Array, " rows"]) -> Search:
    """The last prompt of which a row was refused gives up; nothing changes if none was."""
    number, num_beams = search.token.shape
    refused = jnp.max(status[: number * num_beams].reshape(number, num_beams), axis=1)
    place = jnp.arange(number)
    gives = place == jnp.max(jnp.where(refused != Status.OK, place, -1))
    return replace(
        search,
        beams=replace(search.beams, live=search.beams.live & ~gives),
        status=jnp.where(gives, refused, search.status),
    )


def _permute(
    cache: KVCache,
    search: Search,
    parent: Int32[Array, "prompts beams"],
    max_pages: int,
    reserved: Int32[Array, " rows"],
    committed: Int32[Array, " rows"],
) -> tuple[KVCache, Search]:
    """Every row of a live prompt takes the pages of its parent beam; the rows of the others are emptied.

    It ends the step, which is entered in the log with what it reserved and committed.
    """
    number, num_beams = parent.shape
    row = jnp.arange(number, dtype=jnp.int32)[:, None] * num_beams + parent
    row = jnp.where(search.beams.live[:, None], row, cache.rows).reshape(number * num_beams)
    row = jnp.concatenate([row, jnp.arange(number * num_beams, cache.rows, dtype=jnp.int32)])
    # No row can be refused: rows that move have committed all they reserved, and `max_pages` is all they may map.
    cache, _ = kvjax.reorder(cache, row, max_pages=max_pages)
    return cache, replace(search, log=search.log.append(reserved, committed, row))


def _themselves(search: Search) -> Int32[Array, "prompts beams"]:
    """Every beam as its own parent."""
    number, num_beams = search.token.shape
    return jnp.broadcast_to(jnp.arange(num_beams, dtype=jnp.int32), (number, num_beams))


def _pages(cache: KVCache) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """(pages held, pages that rows map), over all groups."""
    held, mapped = jnp.int32(0), jnp.int32(0)
    for group in cache.table.groups:
        held += group.held
        mapped += jnp.sum(group.end - group.first, dtype=jnp.int32)
    return held, mapped


def _where[Tree](prompts: Bool[Array, " prompts"], new: Tree, old: Tree) -> Tree:
    """Arrays with a leading axis of prompts: the new ones for some prompts, the old ones for the others."""
    return jax.tree.map(lambda one, other: jnp.where(prompts.reshape(-1, *(1,) * (one.ndim - 1)), one, other), new, old)
