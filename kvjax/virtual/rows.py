"""What every row holds and has mapped: growing, sharing and parking, table and mapping kept in step.

Nothing here is safe for threads: the caller holds the space's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int, Int32

from kvjax.pages import Status, check_invariants
from kvjax.virtual.figures import Counters
from kvjax.virtual.flight import Flight
from kvjax.virtual.mapping import Mapping
from kvjax.virtual.ownership import Ownership
from kvjax.virtual.parking import Parked
from kvjax.virtual.reclaim import collect, make_room
from kvjax.virtual.span import SpanLayout
from kvjax.virtual.substrate import AddressRange


class Rows:
    """The rows of a virtual space.

    Attributes:
      layout: sizes.
      owner: which page-groups each row holds.
      range, mapping: the addresses, and what is mapped there.
      flight: the steps that may still run.
      counters: what is counted.
      occupied: rows that a request uses.
      length: committed tokens.
      resident: end of the positions that are mapped; a row's own from its length on.
      touched: the last step that each row took part in.
      parked: what unused rows keep mapped.
      parkings: rows parked so far.
      fences: (epoch, last step issued when it closed) of epochs that may not be complete, oldest first.
    """

    def __init__(self, layout: SpanLayout, num_pages: int, range: AddressRange):
        rows = layout.rows
        self.layout, self.range = layout, range
        self.owner = Ownership(rows=rows, num_pages=num_pages, page_tokens=layout.page_tokens, width=layout.width)
        self.counters = Counters()
        self.mapping = Mapping(range, none=num_pages, counters=self.counters)
        self.flight = Flight()
        self.occupied = np.zeros(rows, bool)
        self.length = np.zeros(rows, np.int64)
        self.resident = np.zeros(rows, np.int64)
        self.touched = np.zeros(rows, np.int64)
        self.parked: dict[int, Parked] = {}
        self.parkings = 0
        self.fences: deque[tuple[int, int]] = deque()

    def grow(
        self, wanted: Int[np.ndarray, " rows"], order: Int[np.ndarray, " rows"] | None = None, *, urgent: bool
    ) -> Int32[np.ndarray, " rows"]:
        """Gives rows memory up to `wanted[r]` tokens, rounded up to page-groups; 0 for rows that want none.

        Rows are served by `order`, smallest first; in row order if None.

        Refused rows hold what they held, less what they were given ahead of need.  With `urgent` it makes room as it
        can; otherwise it takes what is free.
        """
        order = np.arange(self.layout.rows) if order is None else order
        self.sync()
        for row in np.flatnonzero(wanted).tolist():
            if row in self.parked and not self.owner.end[row]:
                self.take(row, np.zeros(0, np.int32), 0)
        collect(self)
        page = self.layout.page_tokens
        tokens = np.where(wanted > 0, np.maximum(-(-wanted // page) * page - self.owner.length, 0), 0)
        status = np.zeros(self.layout.rows, np.int32)
        while tokens.any():
            before = self.owner.table
            codes, copies = self.owner.reserve(tokens, order)
            if not codes.any():
                codes = self._realise(tokens, order, copies, wait=urgent)
            if not codes.any():
                self.counters.copies += len(copies)
                break
            self.owner.table = before
            if not (urgent and make_room(self)):
                refused = codes != Status.OK
                status[refused], tokens[refused] = codes[refused], 0
        self.update_resident(np.flatnonzero(wanted).tolist())
        return status

    def take(self, row: int, shared: Int[np.ndarray, " n"], tokens: int) -> Status:
        """An empty row takes `shared` page-groups, which hold `tokens` tokens, and after them what it has parked."""
        parked = self.parked.pop(row, None)
        kept = shared[:0] if parked is None else parked.from_index(len(shared))
        held = tokens if not len(kept) else (len(shared) + len(kept)) * self.layout.page_tokens
        if held:
            status = self.owner.adopt(row, np.concatenate([shared, kept]), held)
            if status != Status.OK:
                return status
        if parked is not None:
            self.owner.unpin(parked.pages)
        if held > tokens:
            self.owner.rewind(row, tokens)
            self.counters.reused_pages += len(kept)
        return Status.OK

    def park(self, row: int) -> None:
        """Empties a row of the table; what it alone holds, and has mapped, stays for the next request."""
        if not self.owner.end[row]:
            return
        self.sync()
        pages = self.owner.pages_of(row).copy()
        place = self.place(row)
        others = np.flatnonzero(self.owner.refcount[pages] > 1)
        start = int(others[-1]) + 1 if len(others) else 0
        unmapped = self.mapping.differs(place + start, pages[start:])
        kept = pages[start : start + int(unmapped[0])] if len(unmapped) else pages[start:]
        if len(kept):
            self.owner.pin(kept)
            self.parkings += 1
            self.parked[row] = Parked(start, kept, self.parkings)
        self.owner.release(row)

    def show(self, row: int, first: int, *, wait: bool) -> Status:
        """Maps a row's page-groups from index `first` on where they are not mapped yet; all or none."""
        place, pages = self.place(row) + first, self.owner.pages_of(row)[first:]
        if self.mapping.replaces(place, pages) and not self.complete(int(self.touched[row]), wait=wait):
            return Status.PAGES_PENDING
        return Status.OK if self.mapping.show(place, pages) else Status.OUT_OF_PAGES

    def complete(self, step: int, *, wait: bool) -> bool:
        """Whether `step` is complete."""
        return self.flight.wait(step) if wait else self.flight.poll() >= step

    def sync(self) -> None:
        """Brings the table's lengths up to date; steps alone do not touch it."""
        length = np.where(self.occupied, self.length, self.owner.length)
        if np.any(length != self.owner.length):
            self.owner.commit(length)

    def update_resident(self, rows: Iterable[int]) -> None:
        """Notes what the given rows have mapped, and which of all rows would write a page-group with other holders
        next: those must come to `grow` first, for a copy."""
        page, owner = self.layout.page_tokens, self.owner
        resident = self.resident.copy()
        for row in rows:
            held = owner.pages_of(row)
            wrong = self.mapping.differs(self.place(row), held)
            shown = int(wrong[0]) if len(wrong) else len(held)
            resident[row] = min(shown * page, int(owner.reserved[row]), self.layout.max_context)
        tail = np.minimum(self.length // page, self.layout.width - 1)
        mapped = self.occupied & (tail < owner.end)
        tails = np.where(mapped, owner.pages[np.arange(self.layout.rows), tail], 0)
        shared = mapped & (owner.refcount[tails] > 1)
        resident[shared] = self.length[shared]
        self.resident = resident  # at once: a step looks at it without the lock

    def place(self, row: int) -> int:
        """The first of a row's places."""
        return int(row) * self.layout.span_pages

    def pages_for(self, tokens: int) -> int:
        """Page-groups that hold so many tokens."""
        return -(-tokens // self.layout.page_tokens)

    def check(self) -> list[str]:
        """What is violated, a line each: the table's invariants, and that every row sees the page-groups it holds."""
        found = check_invariants(self.owner.table)
        for row in range(self.layout.rows):
            resident = self.pages_for(int(self.resident[row]))
            wrong = self.mapping.differs(self.place(row), self.owner.pages_of(row)[:resident])
            found += [f"row {row}: place {index} does not show the page-group it holds" for index in wrong[:8]]
            if self.resident[row] > self.owner.end[row] * self.layout.page_tokens:
                found.append(f"row {row}: resident={self.resident[row]} is more than it holds")
        for row, parked in self.parked.items():
            if len(self.mapping.differs(self.place(row) + parked.start, parked.pages)):
                found.append(f"row {row}: parked page-groups are not mapped")
            if np.any(self.owner.refcount[parked.pages] != 1):
                found.append(f"row {row}: parked page-groups have other holders than the pin")
        return found

    def _realise(
        self,
        tokens: Int[np.ndarray, " rows"],
        order: Int[np.ndarray, " rows"],
        copies: list[tuple[int, int, int]],
        *,
        wait: bool,
    ) -> Int32[np.ndarray, " rows"]:
        """Copies and maps what the table has granted; the codes of the first row that fails and all after it."""
        status = np.zeros(self.layout.rows, np.int32)
        copy_of = {row: (source, target) for row, source, target in copies}
        by_order = np.argsort(order, kind="stable")
        served = by_order[tokens[by_order] > 0].tolist()
        for index, row in enumerate(served):
            code = Status.OK
            if row in copy_of:
                # Any step in flight may be writing what is to be copied: lengths are committed before it has run.
                code = Status.OK if self.complete(self.flight.issued, wait=wait) else Status.PAGES_PENDING
                if code == Status.OK and not self.range.copy(*copy_of[row]):
                    code = Status.OUT_OF_PAGES
            if code == Status.OK:
                code = self.show(row, int(self.owner.length[row]) // self.layout.page_tokens, wait=wait)
            if code != Status.OK:
                status[served[index:]] = code
                break
        return status
