"""The audit: is a table sound?  On the host, O(rows · width + pool), for tests and for a debugger."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.pages.status import Fault
from kvjax.pages.table import GroupPages, PageTable


def check_invariants(table: PageTable) -> list[str]:
    """What is violated, a line each; empty when the table is sound.

    Checked: sticky faults; `first · page_size ≤ length ≤ reserved ≤ end · page_size`, and no page mapped beyond
    `reserved`; mapped entries are pages and all others `num_pages`; refcount = rows mapping the page + pins; free +
    limbo + held = all pages; the ring names each page without a holder once.
    """
    table = jax.tree.map(np.asarray, table)
    found = [f"sticky faults: {Fault(int(table.faults))!r}"] if table.faults else []
    wrong = {leaf.dtype.name for leaf in jax.tree.leaves(table)} - {"int32"}
    if wrong:
        return [*found, f"arrays of dtype {', '.join(sorted(wrong))}; all must be int32"]
    for row in np.flatnonzero((table.length < 0) | (table.length > table.reserved)):
        found.append(f"row {row}: 0 ≤ length={table.length[row]} ≤ reserved={table.reserved[row]} does not hold")
    for index, group in enumerate(table.groups):
        found += [f"group {index}: {line}" for line in (*_rows(table, group), *_holders(group), *_ring(group))]
    return found


def _rows(table: PageTable, group: GroupPages) -> list[str]:
    found = []
    for row in range(table.rows):
        first, end, page = int(group.first[row]), int(group.end[row]), group.page_size
        length, reserved = int(table.length[row]), int(table.reserved[row])
        if not (0 <= first <= end <= first + group.width and first * page <= length and reserved <= end * page):
            found.append(f"row {row}: {first=} {end=} {length=} {reserved=} do not fit page_size={page}")
            continue
        if end != -(-reserved // page):
            found.append(f"row {row}: maps up to page {end}, but {reserved=} needs {-(-reserved // page)}")
        mapped = np.zeros(group.width, bool)
        mapped[np.arange(first, end) % group.width] = True
        entries = group.pages[row]
        wrong = np.flatnonzero(mapped & ((entries < 0) | (entries >= group.num_pages)))
        found += [f"row {row}: mapped column {column} holds {entries[column]}, no page" for column in wrong]
        stray = np.flatnonzero(~mapped & (entries != group.num_pages))
        found += [f"row {row}: unmapped column {column} holds {entries[column]}" for column in stray]
    return found


def _holders(group: GroupPages) -> list[str]:
    found = []
    mapped = []
    for row, (first, end) in enumerate(zip(group.first.tolist(), group.end.tolist(), strict=True)):
        mapped.append(group.pages[row, np.arange(first, min(end, first + group.width)) % group.width])
    ids = np.concatenate([*mapped, np.zeros(0, np.int32)])
    holders = np.bincount(ids[(ids >= 0) & (ids < group.num_pages)], minlength=group.num_pages) + group.pins
    for page in np.flatnonzero(holders != group.refcount)[:8]:
        found.append(f"page {page}: refcount={group.refcount[page]} but {holders[page]} holders")
    for page in np.flatnonzero(group.pins < 0)[:8]:
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
