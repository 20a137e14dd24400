"""The engine on extents: the backing, and moving pages together between steps.

Rows that grow in turn come to lie in several runs of adjacent pages, and a row whose list of runs is full is refused.
Between device calls the host may read the table and move pages: when a row was refused, and when rows lie in too many
runs on the average.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvjax
from kvjax.engine.backing import Backing, PagedBacking
from kvjax.engine.executables import power_of_two
from kvjax.engine.metrics import Recorder
from kvjax.engine.runner import Runner
from kvjax.engine.sequence import pages_for
from kvjax.extents import CompactionLimits, ExtentTable, plan_compaction
from kvjax.pages.status import raise_for_status
from kvjax.spec import CacheSpec

LEAST_MOVES = 64
"""Pages a compaction may move at least; a smaller bound would save nothing."""

GROWTH = 1.5
"""A compaction that left rows in many runs is tried again when these have grown by so much."""


@dataclass(frozen=True, slots=True)
class ExtentBacking(PagedBacking):
    """A `PagedBacking` whose pages are kept side by side, as far as that goes.

    Attributes:
      extents: how.
      mean_runs: the engine moves pages together when the rows that hold any lie in more runs than this on the average.
    """

    extents: kvjax.extents.ExtentOptions = field(default_factory=kvjax.extents.ExtentOptions)
    mean_runs: float = 4.0

    def init(self, spec: CacheSpec, rows: int) -> kvjax.KVCache:
        return kvjax.init(
            spec,
            rows=rows,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_context=self.max_context,
            extents=self.extents,
        )


class Compactor:
    """Moves pages of a runner's cache together, and records how often.

    Each time the page table is read back and looked at as a whole, then one device call moves what is to be moved, all
    groups one after another.  The pages left behind are free at the end of that call, which comes after all that read
    them.
    """

    def __init__(self, backing: ExtentBacking, runner: Runner, recorder: Recorder):
        self._runner = runner
        self._recorder = recorder
        self._most = backing.mean_runs
        # Any one row can be moved as a whole, with as many other holders of its pages.
        moves = power_of_two(max(LEAST_MOVES, pages_for(backing.max_context, backing.page_size)))
        self._limits = CompactionLimits(moves=moves, entries=2 * moves, pages=4 * moves)
        self._left = 0.0

    def look(self) -> None:
        """After a step: compacts if rows lie in too many runs, and more than the last compaction left them in."""
        mean = self._mean_runs()
        self._recorder.looked_at_runs(mean)
        if mean <= self._most:
            self._left = 0.0
        elif mean >= GROWTH * self._left:
            self.compact()
            self._left = self._mean_runs()

    def compact(self) -> bool:
        """Moves pages so that the rows together lie in fewer runs; False if nothing could be won."""
        moved = [self._compact(group) for group in range(len(self._cache.table.groups))]
        self._recorder.compactions += any(moved)
        self._recorder.moved_pages += sum(moved)
        return any(moved)

    @property
    def _cache(self) -> kvjax.KVCache:
        return self._runner.cache

    def _compact(self, group: int) -> int:
        """Pages moved in one group."""
        ownership = self._cache.ownership
        assert isinstance(ownership, ExtentTable)
        moves = plan_compaction(ownership, self._limits, most_runs=1, group=group)
        if moves is None:
            return 0
        runner, limit = self._runner, self._limits.pages
        runner.cache, status, free = runner.executables.compact(runner.cache, moves, group, limit)
        raise_for_status(status, operation="compaction")
        runner.free = int(free)
        return int(np.count_nonzero(np.asarray(moves.source) < self._cache.table.groups[group].num_pages))

    def _mean_runs(self) -> float:
        """Runs a row in the group where they are most, over the rows that hold pages; 0 if none does."""
        most = 0.0
        for extent in self._cache.extents or ():
            runs = np.asarray(extent.runs.num_runs)
            most = max(most, float(runs.sum()) / max(1, int(np.count_nonzero(runs))))
        return most


def compactor_of(backing: Backing, runner: Runner, recorder: Recorder) -> Compactor | None:
    """What keeps the pages of a backing together, if it wants that."""
    return Compactor(backing, runner, recorder) if isinstance(backing, ExtentBacking) else None


def check_swappable(backing: Any) -> None:
    """ValueError for extents on which a row that comes back from the host might not find its place."""
    if isinstance(backing, ExtentBacking):
        width = pages_for(backing.max_context, backing.page_size)
        if backing.extents.max_runs is None or backing.extents.max_runs < width:
            raise ValueError(
                f"preemption='swap' brings pages back into any that are free, and a row of max_runs="
                f"{backing.extents.max_runs} might have no room to list them; pass ExtentOptions(max_runs={width})"
            )
