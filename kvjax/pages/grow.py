"""Making positions writable, and making them count: `reserve` and `commit`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.inputs import row_integers, static_size
from kvjax.packing import pack_rows
from kvjax.pages.holders import take_pages
from kvjax.pages.mapping import write_entries
from kvjax.pages.plan import GroupPlan, ReservePlan, plan_reserve
from kvjax.pages.status import Status
from kvjax.pages.table import GroupPages, PageTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Info:
    """What a transition says of each row: `Status` codes.  Rows that are not OK are unchanged in every group."""

    status: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PageCopy:
    """The pages one group must copy before the new table is used: at most one a row; `num_pages` means none."""

    source: Int32[Array, " rows"]
    target: Int32[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ReserveInfo:
    """What a `reserve` did.

    Attributes:
      status: `Status` of each row.
      tokens: tokens granted; 0 where refused or not asked.
      copies: the shared tail pages to copy, an entry a group.
    """

    status: Int32[Array, " rows"]
    tokens: Int32[Array, " rows"]
    copies: tuple[PageCopy, ...]


def reserve(
    table: PageTable, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[PageTable, ReserveInfo]:
    """Makes the next `tokens[row]` positions of each row writable.

    Maps the pages they need.  A partly filled tail page with other holders is replaced by a page of the row's own, and
    `copies` says what to copy there before the new table is used.  If every holder of such a page writes in this call,
    the last in order keeps it and the others copy.

    Rows are served strictly in order: after the first that does not fit, every later row that needs a page is refused.

    Args:
      table: the state.
      tokens: positions wanted, 0 for rows that want none.
      max_tokens: static bound on the sum of `tokens`; a row beyond it is refused with OVER_BOUND.
      order: priority of each row, smaller served first, ties by row; row order if None.

    Status: OK, OUT_OF_PAGES, PAGES_PENDING, TABLE_FULL, OVER_BOUND (also for negative counts).
    Cost: O(rows + max_tokens), whatever the pool; at most min(max_tokens, max_tokens // page_size + 2 · rows) new pages
    a group.
    """
    max_tokens = static_size("max_tokens", max_tokens)
    return apply_plan(table, plan_reserve(table, tokens, max_tokens, order), max_tokens)


def apply_plan(table: PageTable, plan: ReservePlan, max_tokens: int) -> tuple[PageTable, ReserveInfo]:
    """Does what a plan for this very table says: its pages come from the head of the ring, row by row."""
    groups, copies, faults = [], [], table.faults
    for group, part in zip(table.groups, plan.groups, strict=True):
        group, copy, fault = _map_pages(group, part, table.length, max_tokens)
        groups.append(group)
        copies.append(copy)
        faults |= fault
    reserved = jnp.where(plan.tokens > 0, jnp.maximum(table.reserved, table.length + plan.tokens), table.reserved)
    table = replace(table, groups=tuple(groups), reserved=reserved, faults=faults)
    return table, ReserveInfo(plan.status, plan.tokens, tuple(copies))


def pages_needed(
    table: PageTable, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[tuple[Int32[Array, " rows"], ...], Int32[Array, " rows"]]:
    """What `reserve` with the same arguments would take and say: pages a row and group, and the status of each row.

    It is the decision `reserve` itself acts on.  A row refused for want of pages shows what it would have needed, one
    refused as TABLE_FULL or OVER_BOUND shows 0.
    """
    plan = plan_reserve(table, tokens, max_tokens, order)
    return plan.needed, plan.status


def commit(table: PageTable, tokens: Int32[Array, " rows"]) -> tuple[PageTable, Info]:
    """Lengthens each row by `tokens[row]` computed tokens.  O(rows).

    Status: OK, or NOT_RESERVED where length + tokens would pass `reserved`, or tokens is negative.
    """
    tokens = row_integers("tokens", tokens, table.rows)
    valid = (tokens >= 0) & (tokens <= table.reserved - table.length)
    length = table.length + jnp.where(valid, tokens, 0)
    return replace(table, length=length), Info(jnp.where(valid, Status.OK, Status.NOT_RESERVED).astype(jnp.int32))


def _map_pages(
    group: GroupPages, plan: GroupPlan, length: Int32[Array, " rows"], max_tokens: int
) -> tuple[GroupPages, PageCopy, Int32[Array, ""]]:
    """Takes the planned pages and enters them in the table."""
    bound = most_pages(max_tokens, group.page_size, length.shape[0])
    needed = plan.needed
    group, ids, faults = take_pages(group, jnp.sum(needed, dtype=jnp.int32), bound)

    row, index = pack_rows(needed, bound)
    copies = plan.copy.at[row].get(mode="fill", fill_value=False)
    tail_index = length // group.page_size
    logical = jnp.where(
        copies & (index == 0),
        tail_index.at[row].get(mode="clip"),
        group.end.at[row].get(mode="clip") + index - copies,
    )
    first_taken = jnp.cumsum(needed) - needed
    target = jnp.where(plan.copy, ids.at[first_taken].get(mode="clip"), group.num_pages)
    source = jnp.where(plan.copy, plan.tail, group.num_pages)

    group = write_entries(group, row, logical, ids)
    group = replace(
        group,
        # Only pages with two holders or more are replaced, and one of them stays: none reaches zero here.
        refcount=group.refcount.at[source].add(-1, mode="drop"),
        end=group.end + plan.fresh,
    )
    return group, PageCopy(source, target), faults


def most_pages(max_tokens: int, page_size: int, rows: int) -> int:
    """The most pages a reserve of `max_tokens` takes in a group: each holds at least one of the granted positions."""
    return min(max_tokens, max_tokens // page_size + 2 * rows)
