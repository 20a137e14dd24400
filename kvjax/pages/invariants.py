"""The audit: is a table sound?  On the host, O(rows · width + pool), for tests and for a debugger."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from kvjax.pages.status import Fault
from kvjax.pages.table import GroupPages, PageTable

_MOST = 8
"""Findings listed of one kind."""

_BLOCK_ENTRIES = 1 << 22
"""Table entries looked at at a time."""


def check_invariants(table: PageTable) -> list[str]:
    """What is violated, a line each; empty when the table is sound.

    Checked: sticky faults; `first · page_size ≤ length ≤ reserved ≤ end · page_size`, and no page mapped beyond
    `reserved`; mapped entries are pages and all others `num_pages`; refcount = rows mapping the page + pins; free +
    limbo + held = all pages; the ring names each page without a holder once; the fence of the last completed epoch
    stands at `ready`, and those of the epochs closed since follow in order, none past `tail`.
    """
    table = jax.tree.map(np.asarray, table)
    found = [f"sticky faults: {Fault(int(table.faults))!r}"] if table.faults else []
    wrong = {leaf.dtype.name for leaf in jax.tree.leaves(table)} - {"int32"}
    if wrong:
        return [*found, f"arrays of dtype {', '.join(sorted(wrong))}; all must be int32"]
    for row in np.flatnonzero((table.length < 0) | (table.length > table.reserved)):
        found.append(f"row {row}: 0 ≤ length={table.length[row]} ≤ reserved={table.reserved[row]} does not hold")
    behind = int(np.subtract(table.epoch, table.completed))  # in 32 bits: epochs wrap around
    if behind < 1:
        found.append(f"completed={table.completed} is not before the open epoch={table.epoch}")
    for index, group in enumerate(table.groups):
        lines = [*_rows(table, group), *_holders(group), *_ring(group), *_fences(table, group, behind)]
        found += [f"group {index}: {line}" for line in lines]
    return found


def _rows(table: PageTable, group: GroupPages) -> list[str]:
    first, end, page, length, reserved = group.first, group.end, group.page_size, table.length, table.reserved
    in_order = (first >= 0) & (first <= end) & (end - first <= group.width)
    fits = in_order & (first.astype(np.int64) * page <= length) & (reserved <= end.astype(np.int64) * page)
    found = [
        f"row {row}: first={first[row]} end={end[row]} length={length[row]} reserved={reserved[row]} do not fit "
        f"page_size={page}"
        for row in np.flatnonzero(~fits)[:_MOST]
    ]
    needed = reserved // page + (reserved % page != 0)
    for row in np.flatnonzero(fits & (end != needed))[:_MOST]:
        found.append(f"row {row}: maps up to page {end[row]}, but reserved={reserved[row]} needs {needed[row]}")
    for rows, mapped in _mapped(group):
        entries, mapped = group.pages[rows], mapped & fits[rows, None]
        wrong = mapped & ((entries < 0) | (entries >= group.num_pages))
        stray = ~mapped & fits[rows, None] & (entries != group.num_pages)
        for which, saying in ((wrong, "{}, no page"), (stray, "{} but is not mapped")):
            for row, column in np.argwhere(which)[:_MOST]:
                found.append(f"row {rows.start + row}: column {column} holds " + saying.format(entries[row, column]))
    return found


def _mapped(group: GroupPages) -> Iterator[tuple[slice, np.ndarray]]:
    """(rows, which of their columns are mapped), a block of rows at a time: tables may be large."""
    columns = np.arange(group.width, dtype=np.int32)
    block = max(1, _BLOCK_ENTRIES // group.width)
    for start in range(0, len(group.first), block):
        rows = slice(start, min(start + block, len(group.first)))
        first, count = group.first[rows, None], (group.end - group.first)[rows, None]
        yield rows, (columns - first) % group.width < count


def _holders(group: GroupPages) -> list[str]:
    holders = group.pins.astype(np.int64)
    for rows, mapped in _mapped(group):
        ids = group.pages[rows][mapped]
        holders += np.bincount(ids[(ids >= 0) & (ids < group.num_pages)], minlength=group.num_pages)
    found = []
    for page in np.flatnonzero(holders != group.refcount)[:_MOST]:
        found.append(f"page {page}: refcount={group.refcount[page]} but {holders[page]} holders")
    for page in np.flatnonzero(group.pins < 0)[:_MOST]:
        found.append(f"page {page}: pins={group.pins[page]} is negative")
    return found


def _ring(group: GroupPages) -> list[str]:
    size = group.num_pages
    for name in ("head", "ready", "tail"):
        if not 0 <= getattr(group, name) < 2 * size:
            return [f"ring cursor {name}={getattr(group, name)} is outside [0, {2 * size})"]
    free, limbo = int(group.free), int(group.limbo)
    held = int(np.count_nonzero(group.refcount))
    found = []
    if free + limbo > size or free + limbo + held != size:
        found.append(f"{free=} + {limbo=} + {held=} is not num_pages={size}")
    ids = group.ring[(int(group.head) + np.arange(min(free + limbo, size))) % size]
    if len(np.unique(ids)) != len(ids):
        found.append("a page stands in the ring twice")
    for page in ids[(ids < 0) | (ids >= size)][:8]:
        found.append(f"the ring holds {page}, no page")
    inside = ids[(ids >= 0) & (ids < size)]
    for page in inside[group.refcount[inside] != 0][:8]:
        found.append(f"page {page} is in the ring but has refcount={group.refcount[page]}")
    return found


def _fences(table: PageTable, group: GroupPages, behind: int) -> list[str]:
    size, max_epochs = 2 * group.num_pages, len(group.fences)
    if not ((group.fences >= 0) & (group.fences < size)).all():
        return [f"fences={group.fences.tolist()} are not all in [0, {size})"]
    # Epochs closed since the last completed one, itself first if its fence has not been overwritten since.
    known = range(min(behind, max_epochs), 0, -1)
    limbo = [int(group.fences[(int(table.epoch) - back) % max_epochs] - group.ready) % size for back in known]
    found = []
    if behind <= max_epochs and limbo and limbo[0] != 0:
        found.append(f"the fence of the completed epoch {table.completed} is not at ready={group.ready}")
    if limbo != sorted(limbo) or (limbo and limbo[-1] > int(group.limbo)):
        found.append(f"the fences stand {limbo} past ready={group.ready}, not in order up to limbo={int(group.limbo)}")
    return found
