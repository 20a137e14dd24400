"""The page table's transitions, on pages that prefer to be adjacent.

Each has the contract of its namesake in `kvjax.pages`: all or nothing per row, over all groups, with the same statuses
and the same cost, to which the runs add O(log max_runs) a row and the sorting of lists of the static bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax import pages
from kvjax.extents.choose import choose_pages
from kvjax.extents.free import bring_pages, note_dropped, note_freed
from kvjax.extents.runs import NO_PAGE, Entries, append, last_page, replace_page, runs_added, shorten
from kvjax.extents.table import Extents, ExtentTable, Runs
from kvjax.inputs import row_integers
from kvjax.packing import pack_rows
from kvjax.pages import AdvanceInfo, Info, PageTable, PinInfo, ReserveInfo, Status
from kvjax.pages.grow import apply_plan, most_pages
from kvjax.pages.mapping import read_entries
from kvjax.pages.plan import GroupPlan, ReservePlan, plan_reserve
from kvjax.pages.table import GroupPages, pages_for


def reserve(
    extents: ExtentTable, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[ExtentTable, ReserveInfo]:
    """Makes the next `tokens[row]` positions of each row writable; see `kvjax.pages.reserve`.

    A row goes on in the page after its last one if that is free, else it begins a run in a span where nobody is; see
    `choose`.  A row that replaces a shared tail begins a run.

    Status, beside those of `kvjax.pages.reserve`: FRAGMENTED for a row that would come to more than `max_runs` runs,
    and for rows that would have kept a shared tail in place beside it.  Other rows are served.
    """
    plan, chosen = _decide(extents, tokens, max_tokens, order)
    table, served = extents.table, plan.tokens > 0
    (plan, chosen), table, parts = lax.optimization_barrier(((plan, chosen), table, extents.extents))
    groups, updated = [], []
    for group, extent, part, entries in zip(table.groups, parts, plan.groups, chosen, strict=True):
        entries = entries.only(served)
        group, extent = bring_pages(group, extent, jnp.where(entries.row < table.rows, entries.page, group.num_pages))
        groups.append(group)
        updated.append(replace(extent, runs=_grow(extent.runs, group, part, table.length, entries)))
    table, info = apply_plan(replace(table, groups=tuple(groups)), plan, max_tokens)
    return ExtentTable(table, tuple(updated)), info


def pages_needed(
    extents: ExtentTable, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[tuple[Int32[Array, " rows"], ...], Int32[Array, " rows"]]:
    """What `reserve` with the same arguments would take and say; see `kvjax.pages.pages_needed`."""
    plan, _ = _decide(extents, tokens, max_tokens, order)
    return plan.needed, plan.status


def commit(extents: ExtentTable, tokens: Int32[Array, " rows"]) -> tuple[ExtentTable, Info]:
    """Lengthens each row by `tokens[row]` computed tokens; see `kvjax.pages.commit`."""
    table, info = pages.commit(extents.table, tokens)
    return replace(extents, table=table), info


def truncate(
    extents: ExtentTable, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[ExtentTable, Info]:
    """Rewinds rows to `length` committed tokens; see `kvjax.pages.truncate`."""
    table, info = pages.truncate(extents.table, length, max_pages=max_pages, rows=rows)
    return _shrunk(extents, table, max_pages), info


def release(extents: ExtentTable, rows: Bool[Array, " rows"], *, max_pages: int) -> tuple[ExtentTable, Info]:
    """Empties rows; see `kvjax.pages.release`."""
    table, info = pages.release(extents.table, rows, max_pages=max_pages)
    return _shrunk(extents, table, max_pages), info


def fork(extents: ExtentTable, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[ExtentTable, Info]:
    """Gives empty rows the committed pages of a parent, and so its runs; see `kvjax.pages.fork`."""
    before = extents.table
    table, info = pages.fork(before, parent, max_pages=max_pages)
    return _remapped(extents, table, (before.length == 0) & (table.length > 0), max_pages), info


def reorder(extents: ExtentTable, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[ExtentTable, Info]:
    """Every row takes its parent's pages, and so its runs; see `kvjax.pages.reorder`."""
    rows = extents.table.rows
    moves = row_integers("parent", parent, rows) != jnp.arange(rows, dtype=jnp.int32)
    table, info = pages.reorder(extents.table, parent, max_pages=max_pages)
    extents = _dropped(extents, table, max_pages)
    return _remapped(extents, extents.table, moves & (info.status == Status.OK), max_pages), info


def adopt(
    extents: ExtentTable, prefix: Sequence[Int32[Array, "rows _"]], tokens: Int32[Array, " rows"], *, max_pages: int
) -> tuple[ExtentTable, Info]:
    """Maps pages that somebody holds into empty rows; see `kvjax.pages.adopt`.

    Status, beside those of `kvjax.pages.adopt`: FRAGMENTED for a prefix in more than `max_runs` runs.
    """
    table = extents.table
    tokens = row_integers("tokens", tokens, table.rows)
    # What the page table would say of each row; only its answer is used, and so only that is computed.
    status = pages.adopt(table, prefix, tokens, max_pages=max_pages)[1].status
    acts = (status == Status.OK) & (tokens > 0)
    fragmented = jnp.zeros(table.rows, bool)
    for group, extent, ids in zip(table.groups, extents.extents, prefix, strict=True):
        row, index = pack_rows(jnp.where(acts, pages_for(tokens, group.page_size), 0), max_pages)
        page = ids.at[row, index].get(mode="fill", fill_value=NO_PAGE).astype(jnp.int32)
        runs = shorten(extent.runs, jnp.where(acts, 0, group.end))
        added = runs_added(runs, Entries(row, index, page, (row < table.rows) & (index == 0)))
        fragmented |= acts & (added > extent.runs.max_runs)
    acts &= ~fragmented
    table, _ = pages.adopt(table, prefix, jnp.where(acts, tokens, 0), max_pages=max_pages)
    status = jnp.where(fragmented, Status.FRAGMENTED, status).astype(jnp.int32)
    return _remapped(extents, table, acts, max_pages), Info(status)


def pin(extents: ExtentTable, ids: Sequence[Int32[Array, " _"]]) -> tuple[ExtentTable, PinInfo]:
    """Adds a pin to each page; see `kvjax.pages.pin`.  A pinned page is not moved by `compact`."""
    table, info = pages.pin(extents.table, ids)
    return replace(extents, table=table), info


def unpin(extents: ExtentTable, ids: Sequence[Int32[Array, " _"]]) -> tuple[ExtentTable, PinInfo]:
    """Takes one pin from each page for each time it is named; see `kvjax.pages.unpin`."""
    table, info = pages.unpin(extents.table, ids)
    most = max(len(each) for each in ids)
    return _dropped(extents, table, most), info


def advance(extents: ExtentTable, completed: Int32[Array, ""]) -> tuple[ExtentTable, AdvanceInfo]:
    """Closes the open epoch and frees the pages dropped up to the end of epoch `completed`; see `kvjax.pages.advance`.

    Whole spans are counted as pages become free: O(1), and O(log) for each page freed, which is once for each dropped.
    """
    table, info = pages.advance(extents.table, completed)
    noted = [note_freed(*each) for each in zip(extents.table.groups, table.groups, extents.extents, strict=True)]
    groups, updated = zip(*noted, strict=True)
    return ExtentTable(replace(table, groups=groups), updated), info


def _decide(
    extents: ExtentTable, tokens: Int32[Array, " rows"], max_tokens: int, order: Int32[Array, " rows"] | None
) -> tuple[ReservePlan, list[Entries]]:
    """Who gets what in a reserve, and for each group which pages."""
    table = extents.table
    plan = plan_reserve(table, tokens, max_tokens, order)
    chosen, fragmented = [], jnp.zeros(table.rows, bool)
    for group, extent, part in zip(table.groups, extents.extents, plan.groups, strict=True):
        entries, over = _choose(group, extent, part, table.length, most_pages(max_tokens, group.page_size, table.rows))
        chosen.append(entries)
        fragmented |= over
    fragmented |= jnp.any(fragmented) & _keeps_a_shared_tail(table, plan)
    return _without(plan, fragmented), chosen


def _choose(
    group: GroupPages, extent: Extents, plan: GroupPlan, length: Int32[Array, " rows"], bound: int
) -> tuple[Entries, Bool[Array, " rows"]]:
    """The pages that rows are to take, and the rows that would have too many runs with them."""
    row, index = pack_rows(plan.needed, bound)
    last = jnp.where(plan.copy, NO_PAGE, last_page(extent.runs))
    page = choose_pages(group, extent, plan.needed, last, (row, index))
    copies = plan.copy.at[row].get(mode="fill", fill_value=False)
    tail, end = ((each.at[row].get(mode="clip")) for each in (length // group.page_size, group.end))
    logical = jnp.where(copies & (index == 0), tail, end + index - copies)
    entries = Entries(row, logical, page, (row < length.shape[0]) & (index == 0))
    runs, appended, inside = _without_tail(extent.runs, group, plan, length, entries)
    most = runs.num_runs + runs_added(runs, appended) + 2 * inside
    return entries, most > runs.max_runs


def _without_tail(
    runs: Runs, group: GroupPages, plan: GroupPlan, length: Int32[Array, " rows"], entries: Entries
) -> tuple[Runs, Entries, Bool[Array, " rows"]]:
    """Makes a reserve an appending: (the runs to append to, what to append, rows whose copy lies before other pages).

    Those rows' copies are no part of what is appended.
    """
    tail = length // group.page_size
    inside = plan.copy & (tail + 1 < group.end)
    runs = shorten(runs, jnp.where(plan.copy & ~inside, tail, group.end))
    apart = entries.first & inside.at[entries.row].get(mode="fill", fill_value=False)
    row = jnp.where(apart, runs.rows, entries.row)
    after_apart = jnp.concatenate([jnp.zeros(1, bool), apart[:-1]])
    first = (entries.first & ~apart) | (after_apart & ~entries.first & (row < runs.rows))
    return runs, replace(entries, row=row, first=first), inside


def _grow(runs: Runs, group: GroupPages, plan: GroupPlan, length: Int32[Array, " rows"], entries: Entries) -> Runs:
    """The runs after the plan, `entries` being the pages it takes."""
    runs, appended, inside = _without_tail(runs, group, plan, length, entries)
    runs = append(runs, appended)
    target = jnp.where(entries.first, entries.row, runs.rows)
    copy = jnp.zeros(runs.rows, jnp.int32).at[target].set(entries.page, mode="drop")
    return lax.cond(
        jnp.any(inside),
        lambda runs: replace_page(runs, inside, length // group.page_size, copy),
        lambda runs: runs,
        runs,
    )


def _keeps_a_shared_tail(table: PageTable, plan: ReservePlan) -> Bool[Array, " rows"]:
    """Rows that may write a shared page because all its other holders copy it in this call."""
    keeps = jnp.zeros(table.rows, bool)
    for group, part in zip(table.groups, plan.groups, strict=True):
        shared = group.refcount.at[part.tail].get(mode="fill", fill_value=0) > 1
        keeps |= (plan.tokens > 0) & shared & ~part.copy
    return keeps


def _without(plan: ReservePlan, fragmented: Bool[Array, " rows"]) -> ReservePlan:
    """The plan with some rows refused as FRAGMENTED."""
    return replace(
        plan,
        status=jnp.where(fragmented, Status.FRAGMENTED, plan.status).astype(jnp.int32),
        tokens=jnp.where(fragmented, 0, plan.tokens),
        groups=tuple(
            replace(part, fresh=jnp.where(fragmented, 0, part.fresh), copy=part.copy & ~fragmented)
            for part in plan.groups
        ),
    )


def _dropped(extents: ExtentTable, table: PageTable, max_pages: int) -> ExtentTable:
    """`table` with the extents, which note where the pages stand that went to limbo on the way to it."""
    noted = [
        note_dropped(old, new, extent, max_pages)
        for old, new, extent in zip(extents.table.groups, table.groups, extents.extents, strict=True)
    ]
    groups, updated = zip(*noted, strict=True)
    return ExtentTable(replace(table, groups=groups), updated)


def _shrunk(extents: ExtentTable, table: PageTable, max_pages: int) -> ExtentTable:
    """What a transition left that only took pages from the ends of rows."""
    extents = _dropped(extents, table, max_pages)
    updated = [
        replace(extent, runs=shorten(extent.runs, group.end))
        for group, extent in zip(extents.table.groups, extents.extents, strict=True)
    ]
    return replace(extents, extents=tuple(updated))


def _remapped(extents: ExtentTable, table: PageTable, rows: Bool[Array, " rows"], max_pages: int) -> ExtentTable:
    """What a transition left that gave some rows other pages altogether."""
    lists = []
    for group in table.groups:
        row, index = pack_rows(jnp.where(rows, group.end, 0), max_pages)
        lists.append(Entries(row, index, read_entries(group, row, index), (row < table.rows) & (index == 0)))
    # What is done next to the table must not begin before it has been read.
    lists, table = lax.optimization_barrier((lists, table))
    updated = []
    for group, extent, entries in zip(table.groups, extents.extents, lists, strict=True):
        runs = append(shorten(extent.runs, jnp.where(rows, 0, group.end)), entries)
        updated.append(replace(extent, runs=runs))
    return ExtentTable(table, tuple(updated))
