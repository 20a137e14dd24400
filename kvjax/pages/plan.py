"""Who gets what in a `reserve`: decided for all rows and groups before anything changes.

Everything here reads the state at entry.  Rows are looked at in the order they are to be served, so that "the rows
before" is a prefix and running sums decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.inputs import INT32_MAX, row_integers, static_size
from kvjax.pages.mapping import read_entries
from kvjax.pages.status import Status
from kvjax.pages.table import GroupPages, PageTable, pages_for


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group's part of a reserve.

    Attributes:
      fresh: pages each row maps after its present end.
      copy: rows that must replace their shared tail page by a copy.
      tail: the page that a row's first new token falls into; `num_pages` if none is mapped there.
    """

    fresh: Int32[Array, " rows"]
    copy: Bool[Array, " rows"]
    tail: Int32[Array, " rows"]

    @property
    def needed(self) -> Int32[Array, " rows"]:
        """Pages to take from the ring."""
        return self.fresh + self.copy


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ReservePlan:
    """The outcome of a reserve.

    Attributes:
      status: `Status` of each row.
      tokens: tokens granted; 0 where refused.
      groups: what each group does; rows that are refused do nothing.
      needed: pages each row would need if every row were served, a tuple entry a group.
    """

    status: Int32[Array, " rows"]
    tokens: Int32[Array, " rows"]
    groups: tuple[GroupPlan, ...]
    needed: tuple[Int32[Array, " rows"], ...]


def plan_reserve(
    table: PageTable, tokens: Int32[Array, " rows"], max_tokens: int, order: Int32[Array, " rows"] | None
) -> ReservePlan:
    """Decides a reserve; `reserve` says what the arguments mean.  O(rows), and a sort of rows if pages are shared."""
    max_tokens = static_size("max_tokens", max_tokens)
    if table.rows * max_tokens > INT32_MAX:
        raise ValueError(f"{max_tokens=} × {table.rows} rows exceeds 32-bit counts; use a smaller max_tokens")
    tokens = row_integers("tokens", tokens, table.rows)
    position = jnp.arange(table.rows, dtype=jnp.int32)
    by_order = rank = position
    if order is not None:
        by_order = jnp.argsort(row_integers("order", order, table.rows), stable=True).astype(jnp.int32)
        rank = jnp.zeros(table.rows, jnp.int32).at[by_order].set(position, unique_indices=True)
    tokens, length = tokens[by_order], table.length[by_order]

    status = _refusals_without_pages(table, tokens, length, max_tokens)
    asking = (tokens > 0) & (status == Status.OK)
    needs = [_group_need(group, by_order, length, tokens, asking) for group in table.groups]

    short, pending = jnp.int32(table.rows), jnp.ones(table.rows, bool)
    for group, need in zip(table.groups, needs, strict=True):
        running = jnp.cumsum(need.needed)
        does_not_fit = (need.needed > 0) & (running > group.free)
        short = jnp.minimum(short, jnp.min(jnp.where(does_not_fit, position, table.rows)))
        pending &= running <= group.free + group.limbo
    takes = jnp.any(jnp.stack([need.needed > 0 for need in needs]), axis=0)
    # A row keeps a shared page only because all its other holders copy in this call.  It is the last of them; if one
    # of them comes after the first refusal, that one was refused, and the page would still be shared.
    deserted = jnp.any(jnp.stack([need.keep & (need.previous >= short) for need in needs]), axis=0)
    refused = asking & ((takes & (position >= short)) | deserted)
    status = jnp.where(refused, jnp.where(pending, Status.PAGES_PENDING, Status.OUT_OF_PAGES), status)
    served = asking & ~refused

    plans = tuple(
        GroupPlan(fresh=jnp.where(served, need.fresh, 0)[rank], copy=(served & need.copy)[rank], tail=need.tail[rank])
        for need in needs
    )
    return ReservePlan(
        status=status.astype(jnp.int32)[rank],
        tokens=jnp.where(served, tokens, 0)[rank],
        groups=plans,
        needed=tuple(need.needed[rank] for need in needs),
    )


def _refusals_without_pages(
    table: PageTable, tokens: Int32[Array, " rows"], length: Int32[Array, " rows"], max_tokens: int
) -> Int32[Array, " rows"]:
    """TABLE_FULL and OVER_BOUND, which do not depend on what is free.  Rows in serving order."""
    capacity = min(group.width * group.page_size for group in table.groups)
    full = tokens > capacity - length
    malformed = (tokens < 0) | (tokens > max_tokens)
    counted = jnp.where(full | malformed, 0, tokens)
    over = malformed | ((jnp.cumsum(counted) > max_tokens) & (tokens > 0))
    return jnp.where(full, Status.TABLE_FULL, jnp.where(over, Status.OVER_BOUND, Status.OK))


@dataclass(frozen=True, slots=True)
class _Need:
    """What one group needs if every asking row is served.  Rows in serving order."""

    fresh: Int32[Array, " rows"]
    copy: Bool[Array, " rows"]
    keep: Bool[Array, " rows"]
    previous: Int32[Array, " rows"]
    tail: Int32[Array, " rows"]

    @property
    def needed(self) -> Int32[Array, " rows"]:
        return self.fresh + self.copy


def _group_need(
    group: GroupPages,
    by_order: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    tokens: Int32[Array, " rows"],
    asking: Bool[Array, " rows"],
) -> _Need:
    end = group.end[by_order]
    tail_index = length // group.page_size
    tail = jnp.where(tail_index < end, read_entries(group, by_order, tail_index), group.num_pages)
    holders = group.refcount.at[tail].get(mode="fill", fill_value=0)
    shared = asking & (holders > 1)
    # What is read of refcounts leaves through the cond alone.  A GPU's compiler would read them again where the answer
    # is used, which is after they have changed, and keep a copy of all of them for that.
    page, number = jnp.where(shared, tail, group.num_pages), jnp.where(shared, holders, 0)
    nobody = jnp.zeros(page.shape, bool)
    copy, keep, previous = lax.cond(
        jnp.any(shared), lambda: _copy_or_keep(page, number), lambda: (nobody, nobody, jnp.full_like(page, -1))
    )
    target = pages_for(jnp.where(asking, length + tokens, 0), group.page_size)
    return _Need(
        fresh=jnp.where(asking, jnp.maximum(target - end, 0), 0), copy=copy, keep=keep, previous=previous, tail=tail
    )


def _copy_or_keep(
    page: Int32[Array, " rows"], holders: Int32[Array, " rows"]
) -> tuple[Bool[Array, " rows"], Bool[Array, " rows"], Int32[Array, " rows"]]:
    """Who must copy its shared tail page, who keeps it, and the row before it on that page; `holders` 0: neither."""
    writers, last, previous = writers_of_each(page)
    keep = (holders > 0) & last & (writers == holders)
    return (holders > 0) & ~keep, keep, previous


def writers_of_each(
    page: Int32[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Bool[Array, " rows"], Int32[Array, " rows"]]:
    """For each place: how many places name the same page, whether it is the last of them, and the place before it.

    The place before is −1 for the first of a page.  O(n log n).
    """
    size = page.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    page_sorted, place_sorted = lax.sort((page, place), num_keys=2)
    begins = jnp.concatenate([jnp.ones(1, bool), page_sorted[1:] != page_sorted[:-1]])
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    first = lax.cummax(jnp.where(begins, place, 0))
    last = lax.cummin(jnp.where(ends, place, size), reverse=True)
    previous = jnp.where(begins, -1, jnp.concatenate([jnp.full(1, -1, jnp.int32), place_sorted[:-1]]))
    result = jnp.zeros(size, jnp.int32)
    return (
        result.at[place_sorted].set(last - first + 1, unique_indices=True),
        jnp.zeros(size, bool).at[place_sorted].set(ends, unique_indices=True),
        result.at[place_sorted].set(previous, unique_indices=True),
    )
