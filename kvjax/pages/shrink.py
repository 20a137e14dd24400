"""Giving positions and pages back: `truncate`, `rewind` and `release`."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.inputs import row_integers, row_mask
from kvjax.packing import pack_rows
from kvjax.pages.grow import Info
from kvjax.pages.mapping import read_entries, unmap, within_bound
from kvjax.pages.status import Status
from kvjax.pages.table import PageTable, pages_for


def truncate(
    table: PageTable, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[PageTable, Info]:
    """Rewinds rows to `length` committed tokens; unmaps and drops what lies beyond, reserved positions included.

    Args:
      table: the state.
      length: the new length of each row; its present length drops just the reserved surplus.
      max_pages: static bound on the pages the call may unmap in one group, over all rows.
      rows: the rows to act on; all if None.

    Status: OK, NOT_RESERVED where `length` is negative or beyond the committed length, OVER_BOUND.
    O(rows + max_pages).
    """
    chosen = jnp.ones(table.rows, bool) if rows is None else row_mask("rows", rows, table.rows)
    length = row_integers("length", length, table.rows)
    valid = (length >= 0) & (length <= table.length)
    status = jnp.where(chosen & ~valid, Status.NOT_RESERVED, Status.OK)
    kept = jnp.where(chosen & valid, length, table.reserved)
    return _shrink(table, kept, status, max_pages)


def rewind(
    table: PageTable, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[PageTable, Info]:
    """Rewinds rows to `length` committed tokens and keeps all they reserved, to be written again.

    The page that `length` falls into may be shared: `reserve` copies it.  Those past it must be the row's alone.

    Args:
      table: the state.
      length: the new length of each row.
      max_pages: static bound on the pages past the new lengths in one group, over all rows.
      rows: the rows to act on; all if None.

    Status: OK, NOT_RESERVED where `length` is negative or beyond the committed length, SHARED, OVER_BOUND.
    O(rows + max_pages).
    """
    chosen = jnp.ones(table.rows, bool) if rows is None else row_mask("rows", rows, table.rows)
    length = row_integers("length", length, table.rows)
    valid = (length >= 0) & (length <= table.length)
    status = jnp.where(chosen & ~valid, Status.NOT_RESERVED, Status.OK)
    acts, shared = chosen & valid, jnp.zeros(table.rows, bool)
    for group in table.groups:
        start = jnp.where(acts, length // group.page_size + 1, 0)
        count = jnp.where(acts, jnp.maximum(group.end - start, 0), 0)
        fits = within_bound(count, max_pages)
        status = jnp.where(fits, status, Status.OVER_BOUND)
        row, index = pack_rows(jnp.where(fits, count, 0), max_pages)
        page = read_entries(group, row, start.at[row].get(mode="clip") + index)
        others = group.refcount.at[page].get(mode="fill", fill_value=1) != 1
        shared |= jnp.zeros(table.rows, jnp.int32).at[row].add(others, mode="drop") > 0
    status = jnp.where(shared & (status == Status.OK), Status.SHARED, status).astype(jnp.int32)
    return replace(table, length=jnp.where(acts & (status == Status.OK), length, table.length)), Info(status)


def release(table: PageTable, rows: Bool[Array, " rows"], *, max_pages: int) -> tuple[PageTable, Info]:
    """Empties rows: finish, cancel or preempt.  Pages left without a holder go to limbo.

    Args:
      table: the state.
      rows: the rows to empty.
      max_pages: static bound on the pages the call may unmap in one group, over all rows.

    Status: OK, EMPTY for a row that held nothing (nothing is freed twice), OVER_BOUND.  O(rows + max_pages).
    """
    rows = row_mask("rows", rows, table.rows)
    empty = jnp.all(jnp.stack([group.end == 0 for group in table.groups]), axis=0)
    status = jnp.where(rows & empty, Status.EMPTY, Status.OK)
    return _shrink(table, jnp.where(rows & ~empty, 0, table.reserved), status, max_pages)


def _shrink(
    table: PageTable, kept: Int32[Array, " rows"], status: Int32[Array, " rows"], max_pages: int
) -> tuple[PageTable, Info]:
    """Unmaps every page past the first `kept` positions; rows that keep all they reserved are left alone."""
    acts = kept < table.reserved
    starts = [jnp.where(acts, pages_for(kept, group.page_size), group.end) for group in table.groups]
    counts = [group.end - start for group, start in zip(table.groups, starts, strict=True)]
    fits = jnp.all(jnp.stack([within_bound(count, max_pages) for count in counts]), axis=0)
    status = jnp.where(fits, status, Status.OVER_BOUND).astype(jnp.int32)
    acts &= fits

    groups, faults = [], table.faults
    for group, start, count in zip(table.groups, starts, counts, strict=True):
        group, fault = unmap(group, start, jnp.where(acts, count, 0), max_pages)
        groups.append(replace(group, end=jnp.where(acts, start, group.end)))
        faults |= fault
    table = replace(
        table,
        length=jnp.where(acts, jnp.minimum(table.length, kept), table.length),
        reserved=jnp.where(acts, kept, table.reserved),
        groups=tuple(groups),
        faults=faults,
    )
    return table, Info(status)
