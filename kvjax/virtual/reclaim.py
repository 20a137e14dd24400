"""Making page-groups free: those dropped and no longer in flight, parked rows, what was given ahead of need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvjax.virtual.ownership import MAX_EPOCHS
from kvjax.virtual.parking import best_fit, coldest

if TYPE_CHECKING:
    from kvjax.virtual.rows import Rows


def make_room(rows: Rows) -> bool:
    """One way to free page-groups, the cheapest that is left: wait for steps in flight, give up the coldest parked
    row, take back what rows were given ahead of need.  False if nothing is left to try."""
    free = rows.owner.free
    if rows.owner.limbo and rows.flight.wait(rows.flight.issued):
        collect(rows)
        if rows.owner.free > free:
            return True
    return reclaim_coldest(rows, wait=True) or take_back_surplus(rows)


def take_back_surplus(rows: Rows) -> bool:
    """Drops page-groups past the committed tokens of every row; False if there are none."""
    needed = -(-rows.owner.length // rows.layout.page_tokens)
    surplus = np.flatnonzero(rows.occupied & (rows.owner.end > needed)).tolist()
    for row in surplus:
        rows.owner.truncate(row, int(rows.owner.length[row]))
    rows.update_resident(surplus)
    return bool(surplus)


def reclaim_coldest(rows: Rows, *, wait: bool) -> bool:
    """Unmaps the row parked longest ago and drops what it kept; False if there is none.

    Rows that a step in flight may read are passed over; if there are no others, waits for the coldest, or gives up.
    """
    busy = [row for row in rows.parked if not rows.complete(int(rows.touched[row]), wait=False)]
    row = coldest(rows.parked, busy)
    if row is None and wait:
        row = coldest(rows.parked)
    if row is None or not rows.complete(int(rows.touched[row]), wait=wait):
        return False
    if not rows.mapping.clear(rows.place(row), rows.layout.span_pages):
        return False
    rows.owner.unpin(rows.parked.pop(row).pages)
    rows.counters.reclaimed_rows += 1
    return True


def collect(rows: Rows) -> None:
    """Frees page-groups in limbo that no step in flight can touch."""
    completed = rows.flight.poll()
    blocked = len(rows.fences) >= MAX_EPOCHS - 2 and rows.fences[0][1] > completed
    if not rows.owner.limbo or blocked:
        return
    rows.fences.append((rows.owner.epoch, rows.flight.issued))
    epoch = rows.owner.completed
    while rows.fences and rows.fences[0][1] <= completed:
        epoch, _ = rows.fences.popleft()
    rows.owner.advance(epoch)


def keep_eager(rows: Rows, pages: int, watermark: int) -> None:
    """Maps one unused row's first `pages` page-groups for a request to come, if none has them and memory is free."""
    unused = np.flatnonzero(~rows.occupied).tolist()
    row = best_fit(rows.parked, unused, pages, 0)
    if row is None or not pages:
        return
    kept = rows.parked.get(row)
    missing = pages - (0 if kept is None else len(kept.from_index(0)))
    if missing > 0 and rows.owner.free >= missing + watermark:
        wanted = np.zeros(rows.layout.rows, np.int64)
        wanted[row] = pages * rows.layout.page_tokens
        rows.grow(wanted, urgent=False)
        rows.resident[row] = 0
        rows.park(row)
