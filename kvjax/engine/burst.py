"""Many decode steps in one device call: pages are allocated, drafts checked and rolled back, rows stopped inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int32, PyTree

import kvjax
from kvjax.engine.backing import Backing
from kvjax.engine.sampling import sample
from kvjax.engine.speculation import Drafter, Drafting, agreed
from kvjax.engine.steps import Report, Slots, close_step, empty_report, next_logits, open_step
from kvjax.models.protocol import Model
from kvjax.pages.status import Status

Stream = Callable[[Any, Any], None]
"""Called on the host while a burst runs, once a step and in order: (tokens [slots, places], how many count [slots])."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Decode:
    """Where each slot of a burst stands and when it ends.

    Attributes:
      history: its newest known tokens, newest last; the last one is not computed yet.  −1 before the beginning.
      limit: tokens it may still generate.
      eos: ids that end it; −1 in padding.
      order: priority of each row.
      steps: steps of this burst at most.
      yield_early: end the burst as soon as a slot has finished, because somebody waits for its place.
    """

    history: Int32[Array, "slots seen"]
    limit: Int32[Array, " slots"]
    eos: Int32[Array, "slots max_eos"]
    order: Int32[Array, " rows"]
    steps: Int32[Array, ""]
    yield_early: Bool[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class _State:
    """A burst between two steps.

    Attributes:
      step: steps done.
      live: slots that go on.
      cautious: a row was refused pages for its drafts; nobody drafts for the rest of the burst.
      stuck: a row was refused a page for one token.
      history: as in `Decode`.
      report: so far.
      cache: the cache.
    """

    step: Int32[Array, ""]
    live: Bool[Array, " slots"]
    cautious: Bool[Array, ""]
    stuck: Bool[Array, ""]
    history: Int32[Array, "slots seen"]
    report: Report
    cache: Any


def decode_burst(
    model: Model,
    backing: Backing,
    drafter: Drafter,
    capacity: int,
    stream: Stream | None,
    parameters: PyTree[Array],
    cache: Any,
    decode: Decode,
    slots: Slots,
) -> tuple[Any, Report]:
    """Up to `decode.steps` ≤ `capacity` decode steps without waiting for the host.

    A slot leaves when it samples one of its eos ids or reaches its limit.  The burst ends when all have left, or after
    a step in which a row was refused a page for one token: that row is as it was, its status is in the report, and the
    next burst takes it up where it stands once there are pages.  If pages lack only for drafts, nobody drafts any more,
    and the step in which that came out does not count.
    """
    number, rows, most = slots.row.shape[0], decode.order.shape[0], drafter.tokens + 1
    drafts = drafter.tokens > 0
    place = jnp.arange(most, dtype=jnp.int32)
    slot_of_row = jnp.zeros(rows, jnp.int32).at[slots.row].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    samplers = jax.tree.map(lambda column: jnp.repeat(column, most), slots.sampler)

    def choose(logits: Array, position: Array) -> Array:
        return sample(logits, slots.sampler, position)[0]

    def more(state: _State) -> Bool[Array, ""]:
        left = (state.report.produced > 0) & ~state.live
        yields = decode.yield_early & jnp.any(left)
        steps = decode.steps + (state.cautious & drafts)
        return (state.step < steps) & jnp.any(state.live) & ~state.stuck & ~yields

    def body(state: _State) -> _State:
        report, live = state.report, state.live
        room = jnp.maximum(decode.limit - report.produced - 1, 0)
        wanted = jnp.where(state.cautious, 0, jnp.minimum(drafter.count(state.history), room))
        count = slots.to_rows(jnp.where(live, wanted + 1, 0), rows)
        cache, grant = open_step(backing, state.cache, count, decode.order, max_tokens=number * most)
        served = slots.of(grant.tokens) > 0
        drafted = jnp.where(served, wanted, 0)
        cache, guess = drafter.draft(parameters, cache, Drafting(state.history, grant, slots.row, choose))

        chain = jnp.concatenate([state.history[:, -1:], guess], axis=1)
        within = jnp.arange(grant.packed, dtype=jnp.int32) - grant.offset.at[grant.row].get(mode="clip")
        fed = chain.at[slot_of_row.at[grant.row].get(mode="clip"), within].get(mode="clip")
        hidden, cache = model.forward(parameters, cache, grant, jnp.maximum(fed, 0))
        cache, hidden = kvjax.after(cache, hidden)
        places = (slots.of(grant.offset)[:, None] + place).reshape(-1)
        position = (slots.of(grant.context - grant.tokens)[:, None] + 1 + place).reshape(-1)
        logits = next_logits(model, parameters, grant, hidden, places)
        token, margin = (value.reshape(number, most) for value in sample(logits, samplers, position))

        accepted = agreed(guess, token, drafted)
        ends = jnp.any(token[:, :, None] == decode.eos[:, None], axis=2)
        ends |= report.produced[:, None] + 1 + place >= decode.limit[:, None]
        first_end = jnp.min(jnp.where(ends, place, most), axis=1)
        emitted = jnp.where(served, jnp.minimum(accepted, first_end) + 1, 0)
        committed = slots.to_rows(emitted, rows)
        cache = close_step(backing, cache, grant, committed, drafts=drafter.tokens, slots=number)
        if stream is not None:
            io_callback(stream, None, token, emitted, ordered=True)

        refused = jnp.any(grant.status != Status.OK)
        at = (jnp.arange(number)[:, None], jnp.where(place < emitted[:, None], report.produced[:, None] + place, -1))
        new_report = Report(
            committed=report.committed + committed,
            status=grant.status,
            tokens=_put(report.tokens, at, token),
            margins=_put(report.margins, at, margin),
            produced=report.produced + emitted,
            copies=report.copies + grant.copies,
            drafted=report.drafted + jnp.sum(drafted, dtype=jnp.int32),
            # A draft counts as accepted if it was used: the tokens after an end were not.
            accepted=report.accepted + jnp.sum(jnp.maximum(emitted - 1, 0), dtype=jnp.int32),
            free=backing.free(cache),
            faults=backing.faults(cache),
            log=report.log.append(count, committed),
        )
        joined = jnp.concatenate([state.history, token], axis=1)
        newest = emitted[:, None] + jnp.arange(drafter.seen, dtype=jnp.int32)
        return _State(
            step=state.step + 1,
            live=live & ~(served & (first_end < emitted)),
            cautious=state.cautious | refused,
            stuck=refused & state.cautious,
            history=jnp.take_along_axis(joined, newest, axis=1),
            report=new_report,
            cache=cache,
        )

    start = _State(
        step=jnp.int32(0),
        live=slots.row < rows,
        cautious=jnp.bool_(not drafts),
        stuck=jnp.bool_(False),
        history=decode.history,
        report=empty_report(rows=rows, slots=number, steps=capacity + drafts, places=(capacity + drafts) * most),
        cache=cache,
    )
    end = lax.while_loop(more, body, start)
    return end.cache, end.report


def _put(buffer: Array, at: tuple[Array, Array], values: Array) -> Array:
    """Writes values at (slot, place); a negative place writes nothing."""
    slot, place = at
    return buffer.at[slot, jnp.where(place < 0, buffer.shape[1], place)].set(values, mode="drop")
