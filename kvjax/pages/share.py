"""Rows that take pages others hold: `fork`, `reorder` and `adopt`.  Nothing is copied; `reserve` copies on write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.inputs import integers, row_integers
from kvjax.packing import pack_rows
from kvjax.pages.grow import Info
from kvjax.pages.holders import any_fault, change_holders
from kvjax.pages.mapping import read_entries, within_bound, write_entries
from kvjax.pages.status import Fault, Status
from kvjax.pages.table import PageTable, pages_for


def fork(table: PageTable, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[PageTable, Info]:
    """Gives empty rows the committed pages of a parent, shared.

    Args:
      table: the state.
      parent: the parent of each child row; anything outside [0, rows) means the row is no child.
      max_pages: static bound on the pages the call may map in one group, over all children.

    Status of a child: OK, ROW_BUSY if it is not empty, EMPTY if the parent has no committed token, RESERVED if the
    parent has reserved more than it committed, OVER_BOUND.  O(rows + max_pages).
    """
    child, source, length, reserved = _parents(table, parent)
    status = jnp.where(length == 0, Status.EMPTY, Status.OK)
    status = jnp.where(reserved > length, Status.RESERVED, status)
    status = jnp.where(_holds_nothing(table), status, Status.ROW_BUSY)
    status = jnp.where(child, status, Status.OK)
    return _take_over(table, source, length, child & (status == Status.OK), status, max_pages, giving_up=False)


def reorder(table: PageTable, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[PageTable, Info]:
    """Every row takes its parent's pages, all at once: a beam search's permutation with repeats.

    A row whose parent is itself is left alone; one whose parent is outside [0, rows) becomes empty.

    Args:
      table: the state.
      parent: the parent of each row.
      max_pages: static bound on the pages rows take, and on those they give up, in one group.

    Status: OK, RESERVED if the parent has reserved more than it committed, OVER_BOUND.  O(rows + max_pages).
    """
    exists, source, length, reserved = _parents(table, parent)
    moves = source != jnp.arange(table.rows, dtype=jnp.int32)
    moves |= ~exists
    length = jnp.where(exists, length, 0)
    status = jnp.where(moves & exists & (reserved > length), Status.RESERVED, Status.OK)
    return _take_over(table, source, length, moves & (status == Status.OK), status, max_pages, giving_up=True)


def adopt(
    table: PageTable,
    pages: Sequence[Int32[Array, "rows _"]],
    tokens: Int32[Array, " rows"],
    *,
    max_pages: int,
) -> tuple[PageTable, Info]:
    """Maps pages that somebody holds into empty rows: a prefix hit.

    Only committed positions may be adopted: what a row has reserved and not committed is its own to write, whoever else
    maps the page.

    Args:
      table: the state.
      pages: for each group, the physical pages of each row's prefix; only the first ceil(tokens / page_size) count.
      tokens: length of the prefix, 0 for rows that adopt nothing.
      max_pages: static bound on the pages the call may map in one group, over all rows.

    Status: OK, STALE if a page has no holder at entry or is no page, ROW_BUSY if the row is not empty, TABLE_FULL if
    the prefix is longer than the row or than `pages`, OVER_BOUND (also for negative tokens).  O(rows + max_pages).
    """
    if len(pages) != len(table.groups):
        raise ValueError(f"adopt needs pages for each of {len(table.groups)} groups, got {len(pages)}")
    tokens = row_integers("tokens", tokens, table.rows)
    pages = [
        integers("pages", ids, (table.rows, None), "page ids [rows, prefix_pages] for each group") for ids in pages
    ]
    asking = tokens != 0
    status = jnp.where(_holds_nothing(table), Status.OK, Status.ROW_BUSY)
    for group, ids in zip(table.groups, pages, strict=True):
        room = min(group.width, ids.shape[1])
        status = jnp.where(pages_for(tokens, group.page_size) > room, Status.TABLE_FULL, status)
    status = jnp.where(tokens < 0, Status.OVER_BOUND, status)
    status = jnp.where(asking, status, Status.OK)
    counts = [jnp.where(status == Status.OK, pages_for(tokens, group.page_size), 0) for group in table.groups]
    fits = jnp.all(jnp.stack([within_bound(count, max_pages) for count in counts]), axis=0)
    status = jnp.where(fits, status, Status.OVER_BOUND)

    lists, stale = [], jnp.zeros(table.rows, bool)
    for group, ids, count in zip(table.groups, pages, counts, strict=True):
        row, index = pack_rows(jnp.where(fits, count, 0), max_pages)
        page = ids.at[row, index].get(mode="fill", fill_value=group.num_pages)
        page = jnp.where((page < 0) | (page > group.num_pages), group.num_pages, page)
        unheld = group.refcount.at[page].get(mode="fill", fill_value=0) < 1
        stale |= jnp.zeros(table.rows, jnp.int32).at[row].add(unheld, mode="drop") > 0
        lists.append((row, index, page))
    status = jnp.where(stale & (status == Status.OK), Status.STALE, status).astype(jnp.int32)

    acts = asking & (status == Status.OK)
    nothing = jnp.zeros(0, jnp.int32)
    groups, faults = [], table.faults
    for group, (row, index, page) in zip(table.groups, lists, strict=True):
        row = jnp.where(acts.at[row].get(mode="fill", fill_value=False), row, table.rows)
        page = jnp.where(row < table.rows, page, group.num_pages)
        group, fault = change_holders(write_entries(group, row, index, page), page, nothing)
        groups.append(replace(group, end=jnp.where(acts, pages_for(tokens, group.page_size), group.end)))
        faults |= fault
    return replace(
        table,
        length=jnp.where(acts, tokens, table.length),
        reserved=jnp.where(acts, tokens, table.reserved),
        groups=tuple(groups),
        faults=faults,
    ), Info(status)


def _parents(
    table: PageTable, parent: Int32[Array, " rows"]
) -> tuple[Bool[Array, " rows"], Int32[Array, " rows"], Int32[Array, " rows"], Int32[Array, " rows"]]:
    """(has a parent, its row, its length, its reserved end); the row stands in for itself where there is no parent."""
    parent = row_integers("parent", parent, table.rows)
    exists = (parent >= 0) & (parent < table.rows)
    source = jnp.where(exists, parent, jnp.arange(table.rows, dtype=jnp.int32))
    return exists, source, table.length[source], table.reserved[source]


def _holds_nothing(table: PageTable) -> Bool[Array, " rows"]:
    return jnp.all(jnp.stack([group.end == 0 for group in table.groups]), axis=0)


def _take_over(
    table: PageTable,
    source: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    acts: Bool[Array, " rows"],
    status: Int32[Array, " rows"],
    max_pages: int,
    *,
    giving_up: bool,
) -> tuple[PageTable, Info]:
    """Acting rows map the first `length` positions' pages of their source, and first give up what they hold.

    Without `giving_up` they hold nothing, and the half of the work that would find it out is left out.
    """
    gains = [jnp.where(acts, pages_for(length, group.page_size), 0) for group in table.groups]
    losses = [jnp.where(acts, group.end, 0) for group in table.groups]
    fits = jnp.all(jnp.stack([within_bound(count, max_pages) for count in (*gains, *losses)]), axis=0)
    status = jnp.where(acts & ~fits, Status.OVER_BOUND, status).astype(jnp.int32)
    acts &= fits

    groups, faults = [], table.faults
    for group, gain, loss in zip(table.groups, gains, losses, strict=True):
        gain, loss = jnp.where(acts, gain, 0), jnp.where(acts, loss, 0)
        row, index = pack_rows(gain, max_pages)
        from_row = source.at[row].get(mode="fill", fill_value=table.rows)
        gained = read_entries(group, from_row, index)
        bad = any_fault((row < table.rows) & (gained >= group.num_pages), Fault.MAPPED_PAGE_UNHELD)
        lost = jnp.zeros(0, jnp.int32)
        if giving_up:
            lost_row, lost_index = pack_rows(loss, max_pages)
            lost = read_entries(group, lost_row, lost_index)
        (gained, lost), pages = lax.optimization_barrier(((gained, lost), group.pages))
        group = replace(group, pages=pages)
        if giving_up:
            group = write_entries(group, lost_row, lost_index, jnp.full_like(lost, group.num_pages))
        group = write_entries(group, row, index, gained)
        group, fault = change_holders(group, gained, lost)
        groups.append(replace(group, end=jnp.where(acts, gain, group.end)))
        faults |= fault | bad
    return replace(
        table,
        length=jnp.where(acts, length, table.length),
        reserved=jnp.where(acts, length, table.reserved),
        groups=tuple(groups),
        faults=faults,
    ), Info(status)
