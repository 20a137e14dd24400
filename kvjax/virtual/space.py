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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from kvjax.attention.xla import BLOCK_TOKENS
from kvjax.inputs import static_size
from kvjax.pages import Status
from kvjax.spec import CacheSpec
from kvjax.virtual.cache import VirtualCache
from kvjax.virtual.figures import Figures
from kvjax.virtual.host import HostSubstrate
from kvjax.virtual.parking import best_fit
from kvjax.virtual.reclaim import collect, keep_eager, reclaim_coldest
from kvjax.virtual.rows import Rows
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
            reads_at_once=substrate.reads_at_once,
        )
        self._backend = substrate.backend
        self._lookahead = static_size("lookahead", lookahead, least=0)
        self._watermark = static_size("watermark", watermark, least=0)
        num_pages = static_size("num_pages", num_pages)
        self._rows = Rows(self.layout, num_pages, substrate.reserve(self.layout, num_pages))
        self._eager_pages = self._rows.pages_for(static_size("eager_tokens", eager_tokens, least=0))
        self._memory = {dtype: self._rows.range.array(self.layout.shape(dtype), dtype) for dtype in self.layout.dtypes}
        self._granted = np.zeros(self.layout.rows, np.int64)  # what the last step said the rows may hold
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-map")
        self._ahead: Future[None] | None = None

    @property
    def length(self) -> Int[np.ndarray, " rows"]:
        """Committed tokens of each row."""
        return self._rows.length.copy()

    @property
    def resident(self) -> Int[np.ndarray, " rows"]:
        """End of the positions of each row that have memory."""
        return self._rows.resident.copy()

    @property
    def available(self) -> int:
        """Page-groups that a step can have: those without a holder, of parked rows, and of rows past what they hold."""
        with self._lock:
            owner, rows = self._rows.owner, self._rows
            needed = -(-rows.length // self.layout.page_tokens)
            surplus = np.sum((owner.end - needed)[rows.occupied & (owner.end > needed)])
            parked = sum(len(parked.pages) for parked in rows.parked.values())
            return owner.free + owner.limbo + parked + int(surplus)

    def admit(self, tokens: int, *, shared: int = 0, row: int | None = None) -> int | None:
        """A row for a new request of `tokens` tokens; None if all are in use.

        The unused row whose parked page-groups fit best: the least sufficient, or the one that has most.  `shared` of
        the tokens will come from another row by `alias`, and need not be parked.  Who places requests elsewhere names
        the `row`; None then says that it is in use.
        """
        with self._lock:
            free = np.flatnonzero(~self._rows.occupied)
            free = free if row is None else free[free == row]
            row = best_fit(self._rows.parked, free.tolist(), self._rows.pages_for(tokens), self._rows.pages_for(shared))
            if row is not None:
                self._rows.occupied[row] = True
                self._rows.length[row] = self._granted[row] = self._rows.resident[row] = 0
            return row

    def alias(self, source: int, target: int, tokens: int) -> Status:
        """Row `target`, admitted and still empty, takes the first `tokens` committed tokens of row `source`.

        Nothing is copied: both map the same page-groups.  Who writes first into a partly filled last one gets a copy.

        Status: OK; NOT_RESERVED if the source has not so many tokens or is not in use; ROW_BUSY if the target holds
        tokens, EMPTY if it is not in use; OUT_OF_PAGES if the platform refuses the mapping, PAGES_PENDING if it would
        have to change under a step that nobody follows.  All but OK leave everything as it was.
        """
        with self._lock:
            if not self._rows.occupied[source] or not 0 < tokens <= self._rows.length[source]:
                return Status.NOT_RESERVED
            self._rows.sync()
            return self.adopt(target, self._rows.owner.pages_of(source)[: self._rows.pages_for(tokens)], tokens)

    def adopt(self, target: int, pages: Int[np.ndarray, " n"], tokens: int) -> Status:
        """`alias` from page-groups that somebody holds, such as those that `pin` gave; STALE if nobody does."""
        with self._lock:
            if not self._rows.occupied[target]:
                return Status.EMPTY
            if self._granted[target]:
                return Status.ROW_BUSY
            self._rows.park(target)
            before, parked = self._rows.owner.table, self._rows.parked.get(target)
            status = self._rows.take(target, np.asarray(pages), tokens)
            if status == Status.OK:
                status = self._rows.show(target, 0, wait=True)
            if status != Status.OK:
                self._rows.owner.table = before
                if parked is not None:
                    self._rows.parked[target] = parked
                return status
            self._rows.length[target] = self._granted[target] = tokens
            self._rows.update_resident([target])
            return Status.OK

    def step(
        self, lengths: Int[np.ndarray, " rows"], order: Int[np.ndarray, " rows"] | None = None
    ) -> Int32[np.ndarray, " rows"]:
        """Opens a step in which row r is to hold `lengths[r]` tokens; 0 for rows that take no part.

        Rows are served by priority, smaller `order` first; in row order if None.

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
        asked = lengths > self._rows.length
        status = np.where((lengths > 0) & ~self._rows.occupied, Status.EMPTY, Status.OK).astype(np.int32)
        status[asked & (lengths > self.layout.max_context)] = Status.TABLE_FULL
        asked &= status == Status.OK
        if np.any(asked & (lengths > self._rows.resident)):
            with self._lock:
                short = asked & (lengths > self._rows.resident)
                if short.any():
                    status |= self._rows.grow(np.where(asked, lengths, 0), order, urgent=True)
            self._rows.counters.stalls += 1
        served = asked & (status == Status.OK)
        self._granted = np.where(served, lengths, self._rows.length)
        self._rows.touched[lengths > 0] = self._rows.flight.issue()
        self._rows.counters.steps += 1
        self._rows.counters.refusals += int(np.count_nonzero(status))
        self._look_ahead(np.where(served, lengths, 0))
        return status

    def cache(self) -> VirtualCache:
        """What a jitted step takes: the memory, and what `step` granted.  Donate nothing of it."""
        # Not what the background thread maps meanwhile: only what was granted can be committed.
        resident = np.minimum(self._rows.resident, self._granted)
        of_rows = (self._rows.length, self._rows.length, resident, self._rows.range.generation)
        length, reserved, resident, generation = jax.device_put([each.astype(np.int32) for each in of_rows])
        return VirtualCache(
            length=length,
            reserved=reserved,
            resident=resident,
            generation=generation,
            handle=jnp.int32(self._rows.range.handle),
            order=jnp.int32(0),
            memory=self._memory,
            layout=self.layout,
            backend=self._backend,
            store=self._rows.range.store,
        )

    def follow(self, value: Any) -> None:
        """The step last opened is complete once the arrays in `value` are there; they must not be donated before.

        Until a step is followed and complete, nothing it might touch is unmapped or used for something else.
        """
        self._rows.flight.follow(value)

    def commit(self, lengths: Int[np.ndarray, " rows"] | None = None) -> None:
        """Rows hold `lengths[r]` committed tokens now; all that the step granted if None.

        Raises:
          ValueError: fewer than were committed before (see `truncate`), or more than were granted.
        """
        lengths = self._granted.copy() if lengths is None else self._checked(lengths)
        wrong = np.flatnonzero((lengths < self._rows.length) | (lengths > self._granted))
        if len(wrong):
            row = wrong[0]
            raise ValueError(
                f"row {row}: commit of {lengths[row]} tokens; it holds {self._rows.length[row]} and was granted "
                f"{self._granted[row]}: commit a number between them, or truncate"
            )
        self._rows.length = lengths

    def truncate(self, row: int, length: int) -> None:
        """Takes back a row's committed tokens past `length`, and the page-groups that hold nothing else.

        Raises:
          ValueError: `length` is negative or beyond what is committed.
        """
        with self._lock:
            if not 0 <= length <= self._rows.length[row]:
                raise ValueError(f"row {row} holds {self._rows.length[row]} tokens and cannot be truncated to {length}")
            self._rows.sync()
            self._rows.owner.truncate(row, length)
            self._rows.length[row] = self._granted[row] = length
            self._rows.update_resident([row])

    def release(self, row: int) -> None:
        """The row's request is over.  Its page-groups stay mapped for the next, save those that others hold too.

        Raises:
          ValueError: the row is not in use.
        """
        with self._lock:
            if not self._rows.occupied[row]:
                raise ValueError(f"row {row} is not in use: it was never admitted, or is released already")
            self._rows.occupied[row] = False
            self._rows.range.generation[row] += 1
            self._rows.length[row] = self._granted[row] = self._rows.resident[row] = 0
            self._rows.park(row)

    def pin(self, row: int, tokens: int) -> Int32[np.ndarray, " n"]:
        """Holds the page-groups of a row's first `tokens` committed tokens beyond the row's end; see `adopt`, `unpin`.

        Raises:
          ValueError: the row has not committed so many tokens.
        """
        with self._lock:
            if not 0 < tokens <= self._rows.length[row]:
                raise ValueError(f"row {row} holds {self._rows.length[row]} tokens; cannot pin {tokens}")
            self._rows.sync()
            pages = self._rows.owner.pages_of(row)[: self._rows.pages_for(tokens)].copy()
            self._rows.owner.pin(pages)
            self._rows.update_resident([])
            return pages

    def unpin(self, pages: Int[np.ndarray, " n"]) -> None:
        """Lets go of what `pin` gave."""
        with self._lock:
            self._rows.owner.unpin(np.asarray(pages))

    def reclaim(self, pages: int) -> int:
        """Gives up parked rows, coldest first, until `pages` page-groups are free or on the way; how many now are.

        A row is left alone while a step that used it runs.
        """
        with self._lock:
            collect(self._rows)
            while self._rows.owner.free + self._rows.owner.limbo < pages and reclaim_coldest(self._rows, wait=False):
                pass
            collect(self._rows)
            return self._rows.owner.free + self._rows.owner.limbo

    def settle(self) -> None:
        """Waits for the background thread; raises what it raised."""
        if self._ahead is not None:
            self._ahead.result()

    def figures(self) -> Figures:
        """Counters and sizes at this moment."""
        with self._lock:
            size, refcount = self.layout.page_bytes, self._rows.owner.refcount
            parked = sum(len(parked.pages) for parked in self._rows.parked.values())
            held = int(np.count_nonzero(refcount))
            rows = np.flatnonzero(self._rows.occupied)
            useful = int(self._rows.length[rows].sum()) * self.layout.record_bytes
            return Figures(
                counters=replace(self._rows.counters),
                reserved_bytes=self.layout.rows * self.layout.span_pages * size,
                resident_bytes=self._rows.range.resident_bytes(),
                useful_bytes=useful,
                held_bytes=(held - parked) * size,
                parked_bytes=parked * size,
                free_bytes=(len(refcount) - held) * size,
                wasted_tail_bytes=int(self._rows.owner.end[rows].sum()) * size - useful,
            )

    def check(self) -> list[str]:
        """What is violated, a line each: the table's invariants, and that every row sees the page-groups it holds."""
        with self._lock:
            return self._rows.check()

    def close(self) -> None:
        """Waits for the steps that are followed, and gives the memory back."""
        self._worker.shutdown()
        with self._lock:
            self._rows.flight.wait(self._rows.flight.issued)
            self._rows.range.close()

    def _look_ahead(self, lengths: Int[np.ndarray, " rows"]) -> None:
        """Has the background thread map what the next steps will need, unless it is still at it."""
        wanted = np.minimum(lengths + self._lookahead, self.layout.max_context)
        wanted[lengths == 0] = 0
        busy = self._ahead is not None and not self._ahead.done()
        if not busy and (np.any(wanted > self._rows.resident) or self._watermark or self._eager_pages):
            self._ahead = self._worker.submit(self._prepare, wanted, self._rows.range.generation.copy())

    def _prepare(self, wanted: Int[np.ndarray, " rows"], generation: Int32[np.ndarray, " rows"]) -> None:
        """The background thread's work after a step."""
        with self._lock:
            self._rows.mapping.ahead = True
            try:
                current = (
                    self._rows.occupied & (self._rows.range.generation == generation) & (wanted > self._rows.resident)
                )
                self._rows.grow(np.where(current, wanted, 0), urgent=False)
                keep_eager(self._rows, self._eager_pages, self._watermark)
                self.reclaim(self._watermark)
            finally:
                self._rows.mapping.ahead = False

    def _checked(self, lengths: Any) -> Int[np.ndarray, " rows"]:
        lengths = np.asarray(lengths)
        if lengths.shape != (self.layout.rows,) or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"lengths has shape {lengths.shape} and dtype {lengths.dtype}; "
                f"pass {self.layout.rows} integers, one a row"
            )
        return lengths.astype(np.int64)
