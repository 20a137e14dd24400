"""Extents driven by the page table's own walk, against the page table's own model.

Ownership has one contract: the model, the comparison and the random operations of `tests.pages` are used as they are.
What extents add is checked after each operation: runs, places and spans agree with the page table; a row is refused as
FRAGMENTED only if its runs could not be listed; compaction moves bytes and nothing else.
"""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from kvjax import extents as E
from kvjax.pages import GroupShape, Status
from tests.pages.harness import MAX_EPOCHS, OPERATIONS, UNWRITTEN, Harness, Setting
from tests.pages.model import Model
from tests.pages.walk import RandomWalk

SETTINGS = {
    "one page": (Setting((GroupShape(1, 4, 2),)), (4,), 1),
    "small pages": (Setting((GroupShape(20, 1, 9),), max_pages=10), (11,), 3),
    "uniform": (Setting((GroupShape(30, 4, 5),)), (7,), 4),
    "two groups": (Setting((GroupShape(16, 3, 6), GroupShape(9, 5, 4))), (8, 6), 2),
    "few runs": (Setting((GroupShape(26, 2, 9),), max_pages=10), (3,), 3),
}
"""The page table's sizes, the most runs a row may have in each group, and pages a span."""

LIMITS = E.CompactionLimits(moves=12, entries=24, pages=45)


def fresh(name: str) -> Any:
    """A transition as it is now, jitted afresh."""
    static = ("max_tokens",) if name in ("reserve", "pages_needed") else ("max_pages", "group")
    return jax.jit(lambda *args, **kwargs: getattr(E, name)(*args, **kwargs), static_argnames=static)


@cache
def compiled() -> dict[str, Any]:
    return {name: fresh(name) for name in (*OPERATIONS, "compact")}


class FragmentedModel(Model):
    """The model, told which rows have no room for their runs: they change nothing, and the others are served."""

    fragmented: np.ndarray

    def reserve(self, tokens: list[int], max_tokens: int, order: list[int] | None) -> tuple[list[Status], list[int]]:
        if not self.fragmented.any():
            return super().reserve(tokens, max_tokens, order)
        status, _ = Model.reserve(copy.deepcopy(self), tokens, max_tokens, order)
        assert all(status[row] == Status.OK for row in np.flatnonzero(self.fragmented)), "refused for another reason"
        status = [Status.FRAGMENTED if f else code for code, f in zip(status, self.fragmented, strict=True)]
        served = [n if code == Status.OK else 0 for n, code in zip(tokens, status, strict=True)]
        return status, super().reserve(served, max_tokens, order)[1]


class ExtentHarness(Harness):
    """The harness, on an extent table: `extents` is the state, `table` and `view` are its page table."""

    def __init__(self, setting: str, operations: dict[str, Any] | None = None) -> None:
        sizes, max_runs, span = SETTINGS[setting]
        super().__init__(sizes, {name: partial(self._call, name) for name in OPERATIONS})
        self.transition_of = compiled() if operations is None else operations
        shapes = [
            E.ExtentShape(s.num_pages, s.page_size, s.width, max_runs=runs, span=span)
            for s, runs in zip(sizes.shapes, max_runs, strict=True)
        ]
        self.extents = E.make_extent_table(shapes, rows=sizes.rows, max_epochs=MAX_EPOCHS)
        self.table = self.extents.table
        self.view = jax.tree.map(np.asarray, self.table)
        self.model = FragmentedModel(sizes.shapes, sizes.rows, MAX_EPOCHS)

    def _call(self, name: str, _: Any, *arguments: Any, **keywords: Any) -> Any:
        """A call of the page table's, made to the extents instead."""
        before = self.extents
        after, info = self.transition_of[name](before, *arguments, **keywords)
        if name == "pages_needed":
            return after, info
        if name == "reserve":
            self.model.fragmented = np.asarray(info.status) == Status.FRAGMENTED
            self._check_fragmented(before, arguments[0])
        self.extents = after
        return after.table, info

    def _check_fragmented(self, before: E.ExtentTable, tokens: np.ndarray) -> None:
        """Rows refused as FRAGMENTED might have needed more runs, or share their tail with one that was."""
        might = np.zeros(self.rows, bool)
        shares = np.zeros(self.rows, bool)
        for group, extent in zip(self.view.groups, before.extents, strict=True):
            row = np.arange(self.rows)
            most = np.asarray(extent.runs.num_runs) + np.maximum(tokens, 0) + 2
            might |= most > extent.runs.max_runs
            tail = np.minimum(self.view.length // group.page_size, group.width - 1)
            page = group.pages[row, tail]
            shares |= (tail < group.end) & (group.refcount[np.minimum(page, group.num_pages - 1)] > 1)
        refused = self.model.fragmented
        assert not (refused & ~might & ~shares).any() and (not refused.any() or (refused & might).any())

    def compact(self, most_runs: int, group: int) -> None:
        """Plans and does a compaction, copies what is to be copied, and wants fewer runs afterwards."""
        moves = E.plan_compaction(self.extents, LIMITS, most_runs=most_runs, group=group)
        if moves is None:
            self.counts["compact:nothing"] += 1
            return
        before = self.extents
        self.extents, info = self.transition_of["compact"](before, moves, group=group, max_pages=LIMITS.pages)
        self._expect("compact", [info.status], [Status.OK])
        source, target = np.asarray(info.copies.source), np.asarray(info.copies.target)
        some = source < len(self.memory[group])
        self.memory[group][target[some]] = self.memory[group][source[some]]
        self.memory[group][source[some]] = UNWRITTEN  # nobody reads there any more
        self.model.free[group] -= int(some.sum())
        self.model.dropped[-1][group] += int(some.sum())
        self._settle("compact", self.extents.table, int(some.sum()))
        runs = [int(each.extents[group].runs.num_runs.sum()) for each in (before, self.extents)]
        assert runs[1] < runs[0], f"{runs[0]} runs before a compaction, {runs[1]} after"

    def compare(self) -> None:
        super().compare()
        assert E.check_invariants(self.extents) == []


class ExtentWalk(RandomWalk):
    """The page table's random walk, with compactions in it."""

    def __init__(self, setting: str, seed: int, operations: dict[str, Any] | None = None) -> None:
        self.harness = ExtentHarness(setting, operations)
        self.random = np.random.default_rng(seed)

    def step(self) -> None:
        super().step()
        if self.random.random() < 0.1:
            group = int(self.random.integers(len(self.harness.shapes)))
            self.harness.compact(int(self.random.integers(1, 3)), group)
            self.harness.compare()
