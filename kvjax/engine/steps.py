"""What runs on the device: one mixed step, a fork, a release, a compaction; `burst` runs many decode steps.

Each is a pure function of the model, the backing and arrays; `Executables` compiles them with the cache donated.
Rows are lines of the cache.  Slots are the rows that may sample in this call, packed, so that logits and sampling cost
what the live rows need and not what the cache could hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

import kvjax
from kvjax.engine.backing import Backing
from kvjax.engine.sampling import Sampler, sample
from kvjax.extents import Moves
from kvjax.grant import Grant
from kvjax.models.protocol import Model


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

    def of(self, values: Int32[Array, " rows"]) -> Int32[Array, " slots"]:
        """A value of each slot's row; 0 in padding."""
        return values.at[self.row].get(mode="fill", fill_value=0)

    def to_rows(self, values: Int32[Array, " slots"], rows: int) -> Int32[Array, " rows"]:
        """The value of each row's slot; 0 for rows without one."""
        return jnp.zeros(rows, jnp.int32).at[self.row].set(values, mode="drop")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Log:
    """What moved ownership, step by step: enough to replay it on another table (see `mirror`).

    Attributes:
      steps: steps that ran.
      reserve: tokens each row asked for.
      commit: tokens each row committed.
      parent: for steps that end with a `kvjax.reorder`, whose pages each row took.
    """

    steps: Int32[Array, ""]
    reserve: Int32[Array, "capacity rows"]
    commit: Int32[Array, "capacity rows"]
    parent: Int32[Array, "capacity rows"] | None = None

    def append(
        self,
        reserve: Int32[Array, " rows"],
        commit: Int32[Array, " rows"],
        parent: Int32[Array, " rows"] | None = None,
    ) -> Log:
        """The log with one more step."""
        return Log(
            self.steps + 1,
            self.reserve.at[self.steps].set(reserve),
            self.commit.at[self.steps].set(commit),
            None if self.parent is None else self.parent.at[self.steps].set(parent),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Report:
    """What a call did.

    Attributes:
      committed: tokens committed a row.
      status: `kvjax.Status` a row; in a burst, that of the step that ended it.
      tokens, margins: what each slot sampled, one after another; the first `produced` of its line count.
      produced: tokens a slot sampled.
      copies: pages copied on write.
      drafted, accepted: drafts that were checked, and those that became tokens.
      free: free pages afterwards.
      faults: sticky `kvjax.Fault` bits.
      log: what moved ownership.
    """

    committed: Int32[Array, " rows"]
    status: Int32[Array, " rows"]
    tokens: Int32[Array, "slots places"]
    margins: Float32[Array, "slots places"]
    produced: Int32[Array, " slots"]
    copies: Int32[Array, ""]
    drafted: Int32[Array, ""]
    accepted: Int32[Array, ""]
    free: Int32[Array, ""]
    faults: Int32[Array, ""]
    log: Log


def empty_report(*, rows: int, slots: int, steps: int, places: int) -> Report:
    """A report of nothing yet, with room for `steps` steps and `places` tokens a slot."""

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.int32)

    return Report(
        committed=zeros(rows),
        status=zeros(rows),
        tokens=zeros(slots, places),
        margins=jnp.zeros((slots, places), jnp.float32),
        produced=zeros(slots),
        copies=zeros(),
        drafted=zeros(),
        accepted=zeros(),
        free=zeros(),
        faults=zeros(),
        log=Log(zeros(), zeros(steps, rows), zeros(steps, rows)),
    )


def open_step(
    backing: Backing, cache: Any, count: Int32[Array, " rows"], order: Int32[Array, " rows"], *, max_tokens: int
) -> tuple[Any, Grant]:
    """Frees what earlier steps let go of, and reserves; with `close_step`, all that moves ownership in a step."""
    return kvjax.reserve(backing.advance(cache), count, max_tokens=max_tokens, order=order)


def close_step(
    backing: Backing, cache: Any, grant: Grant, committed: Int32[Array, " rows"], *, drafts: int = 0, slots: int = 0
) -> Any:
    """Commits; with drafts, gives back what was reserved for those that were not accepted.

    Args:
      backing: of the cache.
      cache: the cache.
      grant: from `open_step`.
      committed: tokens a row, at most those granted.
      drafts: drafts a slot at most, static.
      slots: slots that draft at most, static.
    """
    cache = kvjax.commit(cache, committed)
    if drafts:
        length = grant.context - grant.tokens + committed
        cache, _ = kvjax.truncate(cache, length, max_pages=slots * -(-drafts // backing.page_size))
    return cache


def mixed_step(
    model: Model, backing: Backing, parameters: PyTree[Array], cache: Any, feed: Feed, slots: Slots
) -> tuple[Any, Report]:
    """Prefills and decodes in one batch, and samples after the last token of each slot's row.

    A row that is refused pages is left as it was.
    """
    cache, grant = open_step(backing, cache, feed.count, feed.order, max_tokens=feed.tokens.shape[0])
    # Refused rows leave no gap in the grant, so its places are not those of `feed.tokens`.
    within = jnp.arange(grant.packed, dtype=jnp.int32) - grant.offset.at[grant.row].get(mode="clip")
    place = feed.start.at[grant.row].get(mode="clip") + within
    hidden, cache = model.forward(parameters, cache, grant, feed.tokens.at[place].get(mode="clip"))
    cache, hidden = kvjax.after(cache, hidden)
    cache = close_step(backing, cache, grant, grant.tokens)
    logits = next_logits(model, parameters, grant, hidden, slots.of(grant.last))
    token, margin = sample(logits, slots.sampler, slots.of(grant.context))
    zero = jnp.int32(0)
    return cache, Report(
        committed=grant.tokens,
        status=grant.status,
        tokens=token[:, None],
        margins=margin[:, None],
        produced=(slots.of(grant.tokens) > 0).astype(jnp.int32),
        copies=grant.copies,
        drafted=zero,
        accepted=zero,
        free=backing.free(cache),
        faults=backing.faults(cache),
        log=Log(jnp.int32(1), feed.count[None], grant.tokens[None]),
    )


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


def compact_pages(
    backing: Backing, group: int, max_pages: int, cache: Any, moves: Moves
) -> tuple[Any, Int32[Array, ""], Int32[Array, ""]]:
    """Moves pages of a group together.  Those left behind are free at once, as in `release_rows`.

    Returns the cache, the status and the number of free pages.
    """
    cache, status = kvjax.compact(cache, moves, group=group, max_pages=max_pages)
    cache = backing.advance(cache)
    return cache, status, backing.free(cache)


def next_logits(
    model: Model,
    parameters: PyTree[Array],
    grant: Grant,
    hidden: Float[Array, "packed width"],
    places: Int32[Array, " n"],
) -> Float32[Array, "n vocabulary"]:
    """The model's logits after the packed tokens at `places`; ValueError if its outputs are not what it promised."""
    _check_output("forward", "hidden states", hidden, (grant.packed, None), "floats")
    logits = model.logits(parameters, hidden.at[places].get(mode="clip"))
    _check_output("logits", "logits", logits, (places.shape[0], model.vocabulary), "float32")
    return logits


def _check_output(method: str, what: str, values: Any, shape: tuple[int | None, ...], dtype: str) -> None:
    """ValueError unless a model's output has this shape (None is any size) and dtype ("floats" is any of floats)."""
    got, kind = tuple(values.shape), values.dtype
    fits = len(got) == len(shape) and all(want in (None, size) for want, size in zip(shape, got, strict=True))
    if not fits or not (jnp.issubdtype(kind, jnp.floating) if dtype == "floats" else kind == dtype):
        expected = ", ".join("width" if size is None else str(size) for size in shape)
        raise ValueError(
            f"the model's {method} gave {what} of shape {got} and dtype {kind}; the engine needs "
            f"[{expected}] of {dtype}"
        )
