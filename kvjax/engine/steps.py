"""What runs on the device: one mixed step, a burst of decode steps, a fork and a release.

Each is a pure function of the model, the backing and arrays; `Executables` compiles them with the cache donated.
Rows are lines of the cache.  Slots are the rows that may sample in this call, packed, so that logits and sampling cost
what the live rows need and not what the cache could hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, PyTree

import kvjax
from kvjax.engine.backing import Backing
from kvjax.engine.sampling import Sampler, sample
from kvjax.grant import Grant
from kvjax.models.protocol import Model
from kvjax.pages.status import Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to run through the model in one step, rows one after another.

    Attributes:
      tokens: the packed ids; any valid id in padding.
      start: where each row's tokens begin in `tokens`.
      count: tokens a row.
      order: priority of each row; the smallest is served first.
    """

    tokens: Int32[Array, " packed"]
    start: Int32[Array, " rows"]
    count: Int32[Array, " rows"]
    order: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Slots:
    """The rows that may sample, and how.

    Attributes:
      row: the row of each slot; `rows` (out of range) in padding.
      sampler: how each slot samples.
    """

    row: Int32[Array, " slots"]
    sampler: Sampler


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Decode:
    """Where each slot of a burst stands and when it ends.

    Attributes:
      token: the last token, not yet computed.
      limit: tokens it may still generate.
      eos: ids that end it; −1 in padding.
      order: priority of each row.
      steps: steps of this burst at most.
      yield_early: end the burst as soon as a slot has finished, because somebody waits for its place.
    """

    token: Int32[Array, " slots"]
    limit: Int32[Array, " slots"]
    eos: Int32[Array, "slots max_eos"]
    order: Int32[Array, " rows"]
    steps: Int32[Array, ""]
    yield_early: Bool[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Report:
    """What a call did.

    Attributes:
      granted: tokens computed a row.
      status: `kvjax.Status` a row; in a burst, that of the step that ended it.
      tokens, margins: what each slot sampled, step by step; the first `produced` of its column count.
      produced: tokens a slot sampled.
      copies: pages copied on write.
      free: free pages afterwards.
    """

    granted: Int32[Array, " rows"]
    status: Int32[Array, " rows"]
    tokens: Int32[Array, "steps slots"]
    margins: Float32[Array, "steps slots"]
    produced: Int32[Array, " slots"]
    copies: Int32[Array, ""]
    free: Int32[Array, ""]


def mixed_step(
    model: Model, backing: Backing, parameters: PyTree[Array], cache: Any, feed: Feed, slots: Slots
) -> tuple[Any, Report]:
    """Prefills and decodes in one batch.  A row that is refused pages is left as it was."""
    cache = backing.advance(cache)
    cache, grant = kvjax.reserve(cache, feed.count, max_tokens=feed.tokens.shape[0], order=feed.order)
    # Refused rows leave no gap in the grant, so its places are not those of `feed.tokens`.
    within = jnp.arange(grant.packed, dtype=jnp.int32) - grant.offset.at[grant.row].get(mode="clip")
    place = feed.start.at[grant.row].get(mode="clip") + within
    cache, token, margin = _compute(model, parameters, cache, grant, feed.tokens.at[place].get(mode="clip"), slots)
    return cache, Report(
        granted=grant.tokens,
        status=grant.status,
        tokens=token[None],
        margins=margin[None],
        produced=(_of_slots(grant.tokens, slots) > 0).astype(jnp.int32),
        copies=grant.copies,
        free=backing.free(cache),
    )


def decode_burst(
    model: Model,
    backing: Backing,
    capacity: int,
    parameters: PyTree[Array],
    cache: Any,
    decode: Decode,
    slots: Slots,
) -> tuple[Any, Report]:
    """Up to `decode.steps` ≤ `capacity` decode steps, pages allocated inside, without a word from the host.

    A slot leaves when it samples one of its eos ids or reaches its limit.  The burst ends when all have left, or after
    a step in which a row was refused a page: the host must then decide who gives way.
    """
    number, rows = slots.row.shape[0], decode.order.shape[0]

    def more(state: tuple) -> Bool[Array, ""]:
        step, live, _, report = state[:4]
        left = (report.produced > 0) & ~live
        refused = jnp.any(report.status != Status.OK)
        return (step < decode.steps) & jnp.any(live) & ~refused & ~(decode.yield_early & jnp.any(left))

    def body(state: tuple) -> tuple:
        step, live, last, report, cache = state
        cache = backing.advance(cache)
        count = jnp.zeros(rows, jnp.int32).at[slots.row].set(live.astype(jnp.int32), mode="drop")
        token_of_row = jnp.zeros(rows, jnp.int32).at[slots.row].set(last, mode="drop")
        cache, grant = kvjax.reserve(cache, count, max_tokens=number, order=decode.order)
        fed = token_of_row.at[grant.row].get(mode="fill", fill_value=0)
        cache, token, margin = _compute(model, parameters, cache, grant, fed, slots)
        served = _of_slots(grant.tokens, slots) > 0
        produced = report.produced + served
        ended = jnp.any(token[:, None] == decode.eos, axis=1) | (produced >= decode.limit)
        report = Report(
            granted=report.granted + grant.tokens,
            status=grant.status,
            tokens=report.tokens.at[step].set(token),
            margins=report.margins.at[step].set(margin),
            produced=produced,
            copies=report.copies + grant.copies,
            free=backing.free(cache),
        )
        return step + 1, live & ~(served & ended), jnp.where(served, token, last), report, cache

    start = Report(
        granted=jnp.zeros(rows, jnp.int32),
        status=jnp.full(rows, Status.OK, jnp.int32),
        tokens=jnp.zeros((capacity, number), jnp.int32),
        margins=jnp.zeros((capacity, number), jnp.float32),
        produced=jnp.zeros(number, jnp.int32),
        copies=jnp.zeros((), jnp.int32),
        free=jnp.zeros((), jnp.int32),
    )
    live = slots.row < rows
    _, _, _, report, cache = lax.while_loop(more, body, (jnp.int32(0), live, decode.token, start, cache))
    return cache, report


def release_rows(
    backing: Backing, max_pages: int, cache: Any, rows: Bool[Array, " rows"]
) -> tuple[Any, Int32[Array, " rows"], Int32[Array, ""]]:
    """Empties rows.  Their pages are free at once: the programs that used them were enqueued before this one.

    Returns the cache, the status of each row and the number of free pages.
    """
    cache, status = kvjax.release(cache, rows, max_pages=max_pages)
    cache = backing.advance(cache)
    return cache, status, backing.free(cache)


def fork_rows(max_pages: int, cache: Any, parent: Int32[Array, " rows"]) -> tuple[Any, Int32[Array, " rows"]]:
    """Gives empty rows their parent's committed pages; `rows` as parent means no child."""
    return kvjax.fork(cache, parent, max_pages=max_pages)


def _compute(
    model: Model, parameters: PyTree[Array], cache: Any, grant: Grant, tokens: Int32[Array, " packed"], slots: Slots
) -> tuple[Any, Int32[Array, " slots"], Float32[Array, " slots"]]:
    """Runs granted tokens through the model, commits them, and samples after the last one of each slot's row."""
    hidden, cache = model.forward(parameters, cache, grant, tokens)
    cache, hidden = kvjax.after(cache, hidden)
    cache = kvjax.commit(cache, grant.tokens)
    last = hidden.at[_of_slots(grant.last, slots)].get(mode="clip")
    logits = model.logits(parameters, last)
    token, margin = sample(logits, slots.sampler, _of_slots(grant.context, slots))
    return cache, token, margin


def _of_slots(values: Int32[Array, " rows"], slots: Slots) -> Int32[Array, " slots"]:
    """A value of each slot's row; 0 in padding."""
    return values.at[slots.row].get(mode="fill", fill_value=0)
