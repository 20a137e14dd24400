"""The device side of the engine: the cache, and the calls that change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from typing import Any

import jax
import numpy as np

from kvjax.engine.backing import Backing
from kvjax.engine.batch import make_decode, make_feed, make_slots
from kvjax.engine.burst import Stream
from kvjax.engine.executables import executables_of, power_of_two
from kvjax.engine.mirror import Mirror
from kvjax.engine.scheduler import Share
from kvjax.engine.sequence import Generation, Sequence, pages_for
from kvjax.engine.speculation import Drafter
from kvjax.engine.steps import Report
from kvjax.models.protocol import Model
from kvjax.pages.status import raise_for_faults, raise_for_status


class Runner:
    """Owns the cache of `rows` rows and runs steps on it.

    Attributes:
      rows: of the cache.
      cache: the cache, or the virtual space; replaced by every call, a cache on the device is donated.
      free: pages that can be taken now.
      mirror: the page table on the host, if that is wanted; else None.
      bursting: the generations of the burst that runs now, in the order of its slots.
      executables: the compiled steps.
    """

    def __init__(
        self,
        model: Model,
        backing: Backing,
        *,
        rows: int,
        max_seqs: int,
        burst: int,
        smallest_bucket: int,
        drafter: Drafter,
        stream: Stream | None,
        mirrored: bool,
        clock: Callable[[], float],
    ):
        self._page_size = backing.page_size
        self.rows = rows
        self._max_seqs = max_seqs
        self._burst = burst
        self._smallest_bucket = smallest_bucket
        self._seen = drafter.seen
        self.bursting: tuple[Generation, ...] = ()
        self.mirror = Mirror(backing, model.spec, rows=rows, drafts=drafter.tokens) if mirrored else None
        self.executables = executables_of(backing)(
            model, backing, drafter, burst_steps=burst, stream=stream, mirror=self.mirror, clock=clock
        )
        self.cache: Any = backing.init(model.spec, rows)
        self.free = backing.num_pages

    def mixed(self, shares: Ordered[Share], sampling: Ordered[Generation]) -> Report:
        """One step over all shares; those in `sampling` compute their last known token and get another."""
        bucket = self._bucket(sum(share.count for share in shares))
        feed = make_feed(shares, rows=self.rows, bucket=bucket)
        slots = make_slots(sampling, rows=self.rows, number=self._max_seqs)
        self.cache, report = self.executables.mixed(self.cache, feed, slots)
        return self._fetch(report)

    def burst(self, generations: Ordered[Generation], *, yield_early: bool) -> Report:
        """Decode steps for generations with one pending token each."""
        # No more slots than requests can run: at most as many tokens as rows is what `attend` takes for decode.
        number = min(self._bucket(len(generations)), self._max_seqs)
        decode = make_decode(
            generations,
            rows=self.rows,
            number=number,
            steps=self._burst,
            yield_early=yield_early,
            seen=self._seen,
        )
        slots = make_slots(generations, rows=self.rows, number=number)
        self.bursting = tuple(generations)
        self.cache, report = self.executables.burst(self.cache, decode, slots)
        return self._fetch(report)

    def fork(self, children: Ordered[Sequence]) -> None:
        """Maps the pages of each child's prefix into its row."""
        parents = {}
        for child in children:
            assert child.holder is not None
            parents[child.row] = child.holder.row
        self.share(parents, self._pages(children))

    def share(self, parents: Mapping[int, int], pages: int) -> None:
        """Maps the pages of each child's (the key's) parent row into its row; `pages` of them in all."""
        if not parents:
            return
        parent = np.full(self.rows, self.rows, np.int32)
        parent[list(parents)] = list(parents.values())
        self.cache, status = self.executables.fork(self.cache, parent, pages)
        raise_for_status(status, operation="fork of a shared prefix")

    def release(self, sequences: Ordered[Sequence]) -> None:
        """Unmaps whatever the rows of these sequences hold."""
        rows = np.zeros(self.rows, bool)
        rows[[sequence.row for sequence in sequences if sequence.computed]] = True
        if rows.any():
            self.cache, status, free = self.executables.release(self.cache, rows, self._pages(sequences))
            raise_for_status(status, operation="release")
            self.free = int(free)

    def _fetch(self, report: Report) -> Report:
        report = jax.device_get(report)
        raise_for_faults(report.faults)
        self.free = int(report.free)
        return report

    def _pages(self, sequences: Ordered[Sequence]) -> int:
        return sum(pages_for(sequence.computed, self._page_size) for sequence in sequences)

    def _bucket(self, number: int) -> int:
        return power_of_two(max(number, self._smallest_bucket))
