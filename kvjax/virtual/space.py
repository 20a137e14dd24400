"""`VirtualSpace`: a contiguous span of addresses for every row, and memory behind as much of it as the rows use.

The method is vAttention's (Prabhu et al., ASPLOS 2025): reserve addresses up front, map memory as sequences grow, map
ahead on a background thread, and keep a finished row's mappings for the next.  What it lacks is here from the start:
prefixes are shared page-groups, with refcounts, copy on write and fences, all of it `kvjax.pages`.

    space = VirtualSpace(spec, rows=64, num_pages=4096, max_context=32768)
    row = space.admit(len(prompt))
    lengths[row] = len(prompt)
    status = space.step(lengths)            # positions up to lengths are memory now, and the row's own
    out = run(space.cache(), tokens)        # kvjax.reserve, write, attend and commit, as on any cache
    space.follow(out)                       # the step is over when out is there
    space.commit()

One lock guards ownership and mapping.  A step whose positions are already resident takes no lock and touches no table.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from kvjax.attention.paged import BLOCK_TOKENS
from kvjax.inputs import static_size
from kvjax.pages import Status, check_invariants
from kvjax.spec import CacheSpec
from kvjax.virtual.cache import VirtualCache
from kvjax.virtual.figures import Counters, Figures
from kvjax.virtual.flight import Flight
from kvjax.virtual.host import HostSubstrate
from kvjax.virtual.mapping import Mapping
from kvjax.virtual.ownership import MAX_EPOCHS, Ownership
from kvjax.virtual.parking import Parked, best_fit, coldest
from kvjax.virtual.span import span_layout
from kvjax.virtual.substrate import Substrate


class VirtualSpace:
    """Rows of contiguous addresses with memory mapped on demand.

    Attributes:
      layout: sizes, and where each tensor stands in a token's record.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        rows: int,
        num_pages: int,
        max_context: int,
        page_group_bytes: int = 65536,
        substrate: Substrate | None = None,
        lookahead: int = 16,
        watermark: int = 0,
        eager_tokens: int = 0,
    ):
        """Reserves addresses for all rows; memory comes with use.

        Args:
          spec: what the model caches.
          rows: sequences that can be live at once.
          num_pages: page-groups of memory, at most.
          max_context: tokens a row may hold.
          page_group_bytes: least bytes a page-group; see `layout.page_bytes` for what became of it.
          substrate: the platform; Linux virtual memory if None.
          lookahead: tokens that each row of a step is to have mapped past it, by the background thread.
          watermark: page-groups that are to stay free; below it parked rows are given up, coldest first.
          eager_tokens: one unused row is kept mapped for this many tokens.

        Raises:
          ValueError: a size below its least, or one that does not fit 32-bit positions.
          NotImplementedError: a window group.
          OSError: no such platform here, or it has not this much address space.
        """
        substrate = HostSubstrate() if substrate is None else substrate
        self.layout = span_layout(
            spec,
            rows=rows,
            max_context=max_context,
            page_group_bytes=page_group_bytes,
            granularity=substrate.granularity,
            block=BLOCK_TOKENS,
        )
        self._lookahead = static_size("lookahead", lookahead, least=0)
        self._watermark = static_size("watermark", watermark, least=0)
        self._eager_pages = self._pages_for(static_size("eager_tokens", eager_tokens, least=0))
        rows, num_pages = self.layout.rows, static_size("num_pages", num_pages)
        self._owner = Ownership(
            rows=rows, num_pages=num_pages, page_tokens=self.layout.page_tokens, width=self.layout.width
        )
        self._counters = Counters()
        self._range = substrate.reserve(self.layout, num_pages)
        self._mapping = Mapping(self._range, none=num_pages, counters=self._counters)
        self._memory = {dtype: self._range.array(self.layout.shape(dtype), dtype) for dtype in self.layout.dtypes}

        self._occupied = np.zeros(rows, bool)
        self._length = np.zeros(rows, np.int64)  # committed
        self._granted = np.zeros(rows, np.int64)  # what the last step said the rows may hold
        self._resident = np.zeros(rows, np.int64)  # mapped; the row's own from its length on
        self._touched = np.zeros(rows, np.int64)  # the last step that the row took part in
        self._parked: dict[int, Parked] = {}
        self._parkings = 0
        self._flight = Flight()
        self._fences: deque[tuple[int, int]] = deque()  # (epoch, last step issued when it closed)
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-map")
        self._ahead: Future[None] | None = None

    def admit(self, tokens: int, *, shared: int = 0) -> int | None:
        """A row for a new request of `tokens` tokens; None if all are in use.

        The unused row whose parked page-groups fit best: the least sufficient, or the one that has most.  `shared` of
        the tokens will come from another row by `alias`, and need not be parked.
        """
        with self._lock:
            free = np.flatnonzero(~self._occupied)
            row = best_fit(self._parked, free.tolist(), self._pages_for(tokens), self._pages_for(shared))
            if row is not None:
                self._occupied[row] = True
                self._length[row] = self._granted[row] = self._resident[row] = 0
            return row

    def alias(self, source: int, target: int, tokens: int) -> Status:
        """Row `target`, admitted and still empty, takes the first `tokens` committed tokens of row `source`.

        Nothing is copied: both map the same page-groups.  Who writes first into a partly filled last one gets a copy.

        Status: OK; NOT_RESERVED if the source has not so many tokens or is not in use; ROW_BUSY if the target holds
        tokens, EMPTY if it is not in use; OUT_OF_PAGES if the platform refuses the mapping, PAGES_PENDING if it would
        have to change under a step that nobody follows.  All but OK leave everything as it was.
        """
        with self._lock:
            if not self._occupied[source] or not 0 < tokens <= self._length[source]:
                return Status.NOT_RESERVED
            self._sync()
            return self.adopt(target, self._owner.pages_of(source)[: self._pages_for(tokens)], tokens)

    def adopt(self, target: int, pages: Int[np.ndarray, " n"], tokens: int) -> Status:
        """`alias` from page-groups that somebody holds, such as those that `pin` gave; STALE if nobody does."""
        with self._lock:
            if not self._occupied[target]:
                return Status.EMPTY
            if self._granted[target]:
                return Status.ROW_BUSY
            self._park(target)
            before, parked = self._owner.table, self._parked.get(target)
            status = self._take(target, np.asarray(pages), tokens)
            if status == Status.OK:
                status = self._show(target, 0, wait=True)
            if status != Status.OK:
                self._owner.table = before
                if parked is not None:
                    self._parked[target] = parked
                return status
            self._length[target] = self._granted[target] = tokens
            self._update_resident([target])
            return Status.OK

    def step(self, lengths: Int[np.ndarray, " rows"]) -> Int32[np.ndarray, " rows"]:
        """Opens a step in which row r is to hold `lengths[r]` tokens; 0 for rows that take no part.

        For every row that is served, positions from its committed length up to `lengths[r]` have memory and are its own
        to write.  In a steady decode that was done ahead, and nothing is left to do here.

        Status of a row, as of `pages.reserve`: OK; OUT_OF_PAGES, also if the platform refuses memory or a mapping;
        PAGES_PENDING if memory waits for a step that nobody follows; TABLE_FULL beyond `max_context`; EMPTY for a row
        not in use.  A row that is refused is as it was, and so are all after it that needed memory.

        Raises what the background thread raised since the last call.
        """
        lengths = self._checked(lengths)
        if self._ahead is not None and self._ahead.done():
            self._ahead.result()
        asked = lengths > self._length
        status = np.where((lengths > 0) & ~self._occupied, Status.EMPTY, Status.OK).astype(np.int32)
        status[asked & (lengths > self.layout.max_context)] = Status.TABLE_FULL
        asked &= status == Status.OK
        if np.any(asked & (lengths > self._resident)):
            with self._lock:
                short = asked & (lengths > self._resident)
                if short.any():
                    status |= self._grow(np.where(asked, lengths, 0), urgent=True)
            self._counters.stalls += 1
        served = asked & (status == Status.OK)
        self._granted = np.where(served, lengths, self._length)
        self._touched[lengths > 0] = self._flight.issue()
        self._counters.steps += 1
        self._counters.refusals += int(np.count_nonzero(status))
        self._look_ahead(np.where(served, lengths, 0))
        return status

    def cache(self) -> VirtualCache:
        """What a jitted step takes: the memory, and what `step` granted.  Donate nothing of it."""
        length, reserved, resident, generation = jax.device_put(
            [each.astype(np.int32) for each in (self._length, self._length, self._resident, self._range.generation)]
        )
        return VirtualCache(
            length=length,
            reserved=reserved,
            resident=resident,
            generation=generation,
            order=jnp.int32(0),
            memory=self._memory,
            layout=self.layout,
            reads_unmapped=self._range.reads_unmapped,
            store=self._range.store,
        )

    def follow(self, value: Any) -> None:
        """The step last opened is complete once the arrays in `value` are there; they must not be donated before.

        Until a step is followed and complete, nothing it might touch is unmapped or used for something else.
        """
        self._flight.follow(value)

    def commit(self, lengths: Int[np.ndarray, " rows"] | None = None) -> None:
        """Rows hold `lengths[r]` committed tokens now; all that the step granted if None.

        Raises:
          ValueError: fewer than were committed before (see `truncate`), or more than were granted.
        """
        lengths = self._granted.copy() if lengths is None else self._checked(lengths)
        wrong = np.flatnonzero((lengths < self._length) | (lengths > self._granted))
        if len(wrong):
            row = wrong[0]
            raise ValueError(
                f"row {row}: commit of {lengths[row]} tokens; it holds {self._length[row]} and was granted "
                f"{self._granted[row]}: commit a number between them, or truncate"
            )
        self._length = lengths

    def truncate(self, row: int, length: int) -> None:
        """Takes back a row's committed tokens past `length`, and the page-groups that hold nothing else.

        Raises:
          ValueError: `length` is negative or beyond what is committed.
        """
        with self._lock:
            if not 0 <= length <= self._length[row]:
                raise ValueError(f"row {row} holds {self._length[row]} tokens and cannot be truncated to {length}")
            self._sync()
            self._owner.truncate(row, length)
            self._length[row] = self._granted[row] = length
            self._update_resident([row])

    def release(self, row: int) -> None:
        """The row's request is over.  Its page-groups stay mapped for the next, save those that others hold too.

        Raises:
          ValueError: the row is not in use.
        """
        with self._lock:
            if not self._occupied[row]:
                raise ValueError(f"row {row} is not in use: it was never admitted, or is released already")
            self._occupied[row] = False
            self._range.generation[row] += 1
            self._length[row] = self._granted[row] = self._resident[row] = 0
            self._park(row)

    def pin(self, row: int, tokens: int) -> Int32[np.ndarray, " n"]:
        """Holds the page-groups of a row's first `tokens` committed tokens beyond the row's end; see `adopt`, `unpin`.

        Raises:
          ValueError: the row has not committed so many tokens.
        """
        with self._lock:
            if not 0 < tokens <= self._length[row]:
                raise ValueError(f"row {row} holds {self._length[row]} tokens; cannot pin {tokens}")
            self._sync()
            pages = self._owner.pages_of(row)[: self._pages_for(tokens)].copy()
            self._owner.pin(pages)
            self._update_resident([])
            return pages

    def unpin(self, pages: Int[np.ndarray, " n"]) -> None:
        """Lets go of what `pin` gave."""
        with self._lock:
            self._owner.unpin(np.asarray(pages))

    def reclaim(self, pages: int) -> int:
        """Gives up parked rows, coldest first, until `pages` page-groups are free or on the way; how many now are.

        A row is left alone while a step that used it runs.
        """
        with self._lock:
            self._collect()
            while self._owner.free + self._owner.limbo < pages and self._reclaim_coldest(wait=False):
                pass
            self._collect()
            return self._owner.free + self._owner.limbo

    def settle(self) -> None:
        """Waits for the background thread; raises what it raised."""
        if self._ahead is not None:
            self._ahead.result()

    def figures(self) -> Figures:
        """Counters and sizes at this moment."""
        with self._lock:
            size, refcount = self.layout.page_bytes, self._owner.refcount
            parked = sum(len(parked.pages) for parked in self._parked.values())
            held = int(np.count_nonzero(refcount))
            rows = np.flatnonzero(self._occupied)
            useful = int(self._length[rows].sum()) * self.layout.record_bytes
            return Figures(
                counters=replace(self._counters),
                reserved_bytes=self.layout.rows * self.layout.span_pages * size,
                resident_bytes=self._range.resident_bytes(),
                useful_bytes=useful,
                held_bytes=(held - parked) * size,
                parked_bytes=parked * size,
                free_bytes=(len(refcount) - held) * size,
                wasted_tail_bytes=int(self._owner.end[rows].sum()) * size - useful,
            )

    def check(self) -> list[str]:
        """What is violated, a line each: the table's invariants, and that every row sees the page-groups it holds."""
        with self._lock:
            found = check_invariants(self._owner.table)
            for row in range(self.layout.rows):
                resident = self._pages_for(int(self._resident[row]))
                wrong = self._mapping.differs(self._place(row), self._owner.pages_of(row)[:resident])
                found += [f"row {row}: place {index} does not show the page-group it holds" for index in wrong[:8]]
                if self._resident[row] > self._owner.end[row] * self.layout.page_tokens:
                    found.append(f"row {row}: resident={self._resident[row]} is more than it holds")
            for row, parked in self._parked.items():
                if len(self._mapping.differs(self._place(row) + parked.start, parked.pages)):
                    found.append(f"row {row}: parked page-groups are not mapped")
                if np.any(self._owner.refcount[parked.pages] != 1):
                    found.append(f"row {row}: parked page-groups have other holders than the pin")
            return found

    def close(self) -> None:
        """Waits for the steps that are followed, and gives the memory back."""
        self._flight.wait(self._flight.issued)
        self._worker.shutdown()
        with self._lock:
            self._range.close()

    def _grow(self, wanted: Int[np.ndarray, " rows"], *, urgent: bool) -> Int32[np.ndarray, " rows"]:
        """Gives rows memory up to `wanted[r]` tokens, rounded up to page-groups; 0 for rows that want none.

        Refused rows hold what they held, less what they were given ahead of need.  With `urgent` it makes room as it
        can; otherwise it takes what is free.
        """
        self._sync()
        for row in np.flatnonzero(wanted):
            if row in self._parked and not self._owner.end[row]:
                self._take(int(row), np.zeros(0, np.int32), 0)
        self._collect()
        page = self.layout.page_tokens
        tokens = np.where(wanted > 0, -(-wanted // page) * page - self._owner.length, 0)
        status = np.zeros(self.layout.rows, np.int32)
        while tokens.any():
            before = self._owner.table
            codes, copies = self._owner.reserve(tokens)
            if not codes.any():
                codes = self._realise(tokens, copies, wait=urgent)
            if not codes.any():
                self._counters.copies += len(copies)
                break
            self._owner.table = before
            if not (urgent and self._make_room()):
                refused = codes != Status.OK
                status[refused], tokens[refused] = codes[refused], 0
        self._update_resident(np.flatnonzero(wanted).tolist())
        return status

    def _realise(
        self, tokens: Int[np.ndarray, " rows"], copies: list[tuple[int, int, int]], *, wait: bool
    ) -> Int32[np.ndarray, " rows"]:
        """Copies and maps what the table has granted; the codes of the first row that fails and all after it."""
        status = np.zeros(self.layout.rows, np.int32)
        copy_of = {row: (source, target) for row, source, target in copies}
        for row in np.flatnonzero(tokens):
            code = Status.OK
            if row in copy_of:
                # Any step in flight may be writing what is to be copied: lengths are committed before it has run.
                code = Status.OK if self._complete(self._flight.issued, wait) else Status.PAGES_PENDING
                if code == Status.OK and not self._range.copy(*copy_of[row]):
                    code = Status.OUT_OF_PAGES
            if code == Status.OK:
                code = self._show(int(row), int(self._owner.length[row]) // self.layout.page_tokens, wait=wait)
            if code != Status.OK:
                after = (np.arange(self.layout.rows) >= row) & (tokens > 0)
                return np.where(after, code, status).astype(np.int32)
        return status

    def _show(self, row: int, first: int, *, wait: bool) -> Status:
        """Maps a row's page-groups from index `first` on where they are not mapped yet; all or none."""
        place, pages = self._place(row) + first, self._owner.pages_of(row)[first:]
        if self._mapping.replaces(place, pages) and not self._complete(int(self._touched[row]), wait):
            return Status.PAGES_PENDING
        return Status.OK if self._mapping.show(place, pages) else Status.OUT_OF_PAGES

    def _take(self, row: int, shared: Int[np.ndarray, " n"], tokens: int) -> Status:
        """An empty row takes `shared` page-groups, which hold `tokens` tokens, and after them what it has parked."""
        parked = self._parked.pop(row, None)
        kept = shared[:0] if parked is None else parked.from_index(len(shared))
        held = tokens if not len(kept) else (len(shared) + len(kept)) * self.layout.page_tokens
        if held:
            status = self._owner.adopt(row, np.concatenate([shared, kept]), held)
            if status != Status.OK:
                return status
        if parked is not None:
            self._owner.unpin(parked.pages)
        if held > tokens:
            self._owner.rewind(row, tokens)
            self._counters.reused_pages += len(kept)
        return Status.OK

    def _park(self, row: int) -> None:
        """Empties a row of the table; what it alone holds, and has mapped, stays for the next request."""
        if not self._owner.end[row]:
            return
        self._sync()
        pages = self._owner.pages_of(row).copy()
        place = self._place(row)
        others = np.flatnonzero(self._owner.refcount[pages] > 1)
        start = int(others[-1]) + 1 if len(others) else 0
        unmapped = self._mapping.differs(place + start, pages[start:])
        kept = pages[start : start + int(unmapped[0])] if len(unmapped) else pages[start:]
        if len(kept):
            self._owner.pin(kept)
            self._parkings += 1
            self._parked[row] = Parked(start, kept, self._parkings)
        self._owner.release(row)

    def _look_ahead(self, lengths: Int[np.ndarray, " rows"]) -> None:
        """Has the background thread map what the next steps will need, unless it is still at it."""
        wanted = np.minimum(lengths + self._lookahead, self.layout.max_context)
        wanted[lengths == 0] = 0
        busy = self._ahead is not None and not self._ahead.done()
        if not busy and (np.any(wanted > self._resident) or self._watermark or self._eager_pages):
            self._ahead = self._worker.submit(self._prepare, wanted, self._range.generation.copy())

    def _prepare(self, wanted: Int[np.ndarray, " rows"], generation: Int32[np.ndarray, " rows"]) -> None:
        """The background thread's work after a step."""
        with self._lock:
            self._mapping.ahead = True
            try:
                current = self._occupied & (self._range.generation == generation) & (wanted > self._resident)
                self._grow(np.where(current, wanted, 0), urgent=False)
                self._keep_eager()
                self.reclaim(self._watermark)
            finally:
                self._mapping.ahead = False

    def _keep_eager(self) -> None:
        """Maps one unused row for a request to come, if none is and memory is free."""
        unused = np.flatnonzero(~self._occupied).tolist()
        row = best_fit(self._parked, unused, self._eager_pages, 0)
        if row is None or not self._eager_pages:
            return
        kept = self._parked.get(row)
        missing = self._eager_pages - (0 if kept is None else len(kept.from_index(0)))
        if missing > 0 and self._owner.free >= missing + self._watermark:
            wanted = np.zeros(self.layout.rows, np.int64)
            wanted[row] = self._eager_pages * self.layout.page_tokens
            self._grow(wanted, urgent=False)
            self._resident[row] = 0
            self._park(row)

    def _make_room(self) -> bool:
        """One way to free page-groups, the cheapest that is left: wait for steps in flight, give up the coldest parked
        row, take back what rows were given ahead of need.  False if nothing is left to try."""
        free = self._owner.free
        if self._owner.limbo and self._flight.wait(self._flight.issued):
            self._collect()
            if self._owner.free > free:
                return True
        return self._reclaim_coldest(wait=True) or self._take_back_surplus()

    def _take_back_surplus(self) -> bool:
        """Drops page-groups past the committed tokens of every row; False if there are none."""
        needed = -(-self._owner.length // self.layout.page_tokens)
        rows = np.flatnonzero(self._occupied & (self._owner.end > needed)).tolist()
        for row in rows:
            self._owner.truncate(row, int(self._owner.length[row]))
        self._update_resident(rows)
        return bool(rows)

    def _reclaim_coldest(self, *, wait: bool) -> bool:
        """Unmaps the row parked longest ago whose steps are complete, and drops what it kept; False if there is none."""
        busy = [row for row in self._parked if not self._complete(int(self._touched[row]), wait)]
        row = coldest(self._parked, busy)
        if row is None or not self._mapping.clear(self._place(row), self.layout.span_pages):
            return False
        self._owner.unpin(self._parked.pop(row).pages)
        self._counters.reclaimed_rows += 1
        return True

    def _complete(self, step: int, wait: bool) -> bool:
        """Whether `step` is complete."""
        return self._flight.wait(step) if wait else self._flight.poll() >= step

    def _collect(self) -> None:
        """Frees page-groups in limbo that no step in flight can touch."""
        completed = self._flight.poll()
        blocked = len(self._fences) >= MAX_EPOCHS - 2 and self._fences[0][1] > completed
        if not self._owner.limbo or blocked:
            return
        self._fences.append((self._owner.epoch, self._flight.issued))
        epoch = self._owner.completed
        while self._fences and self._fences[0][1] <= completed:
            epoch, _ = self._fences.popleft()
        self._owner.advance(epoch)

    def _sync(self) -> None:
        """Brings the table's lengths up to date; steps alone do not touch it."""
        length = np.where(self._occupied, self._length, self._owner.length)
        if np.any(length != self._owner.length):
            self._owner.commit(length)

    def _update_resident(self, rows: Iterable[int]) -> None:
        """Notes what the given rows have mapped, and which of all rows would write a page-group with other holders next:
        those must come to `_grow` first, for a copy."""
        page, owner = self.layout.page_tokens, self._owner
        for row in rows:
            held = owner.pages_of(row)
            wrong = self._mapping.differs(self._place(row), held)
            shown = int(wrong[0]) if len(wrong) else len(held)
            self._resident[row] = min(shown * page, int(owner.reserved[row]), self.layout.max_context)
        tail = np.minimum(self._length // page, self.layout.width - 1)
        mapped = self._occupied & (tail < owner.end)
        tails = np.where(mapped, owner.pages[np.arange(self.layout.rows), tail], 0)
        shared = mapped & (owner.refcount[tails] > 1)
        self._resident[shared] = self._length[shared]

    def _checked(self, lengths: Any) -> Int[np.ndarray, " rows"]:
        lengths = np.asarray(lengths)
        if lengths.shape != (self.layout.rows,) or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"lengths has shape {lengths.shape} and dtype {lengths.dtype}; pass {self.layout.rows} integers, one a row"
            )
        return lengths.astype(np.int64)

    def _place(self, row: int) -> int:
        return int(row) * self.layout.span_pages

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.layout.page_tokens)
