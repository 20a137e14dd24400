"""What to compact: decided on the host, from a table that was read back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.extents.compaction import Moves
from kvjax.extents.table import ExtentTable
from kvjax.pages.table import GroupPages


@dataclass(frozen=True)
class CompactionLimits:
    """How much one compaction may do: the static sizes of its lists.

    Attributes:
      moves: pages that may be moved.
      entries: table entries that may change; more than `moves` where pages are shared.
      pages: pages of the rows that are touched, `max_pages` of `compact`.
    """

    moves: int
    entries: int
    pages: int


def plan_compaction(extents: ExtentTable, limits: CompactionLimits, *, most_runs: int, group: int = 0) -> Moves | None:
    """What to move so that rows in more than `most_runs` runs come to fewer; None if nothing is to be won.

    The rows in the most runs come first.  Each goes to the smallest free stretch that takes all of its pages but those
    with a pin and those that this plan has already moved, and only if the rows that map them then have fewer runs
    together, and none too many.  A shared page moves once, for all its rows.

    Reads the table back and looks at all of it, O(rows · width + pool): for between bursts.
    """
    planner = _Planner(extents, limits, group)
    for row in sorted(planner.pages, key=lambda row: (-number_of_runs(planner.pages[row]), row)):
        if number_of_runs(planner.pages[row]) > most_runs:
            planner.try_to_move(row)
    return planner.moves() if planner.moved else None


def number_of_runs(pages: np.ndarray) -> int:
    """Stretches of ascending neighbours in a row's physical pages."""
    return int(np.count_nonzero(np.diff(pages) != 1)) + (len(pages) > 0)


class _Planner:
    """Rows as they would be after the moves so far, and what is left of the limits."""

    def __init__(self, extents: ExtentTable, limits: CompactionLimits, group: int) -> None:
        held: GroupPages = jax.tree.map(np.asarray, extents.table.groups[group])
        self.limits, self.num_pages, self.rows = limits, held.num_pages, len(held.end)
        self.max_runs = extents.extents[group].runs.max_runs
        self.pages = {row: np.asarray(held.pages[row, :end]) for row, end in enumerate(held.end) if end}
        self.pinned = held.pins > 0
        self.holders: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, mine in self.pages.items():
            for logical, page in enumerate(mine.tolist()):
                self.holders[page].append((row, logical))
        self.stretches = _stretches(held)
        self.moved: dict[int, int] = {}
        self.targets: set[int] = set()
        self.touched: set[int] = set()
        self.entries = 0

    def try_to_move(self, row: int) -> None:
        going = [page for page in self.pages[row].tolist() if not self.pinned[page] and page not in self.targets]
        fitting = [stretch for stretch in self.stretches if stretch[1] >= len(going)]
        if not going or not fitting:
            return
        start, length = stretch = min(fitting, key=lambda stretch: (stretch[1], stretch[0]))
        proposal = dict(zip(going, range(start, start + len(going)), strict=True))
        entries = sum(len(self.holders[page]) for page in going)
        rows = {holder for page in going for holder, _ in self.holders[page]}
        after = {r: np.array([proposal.get(page, page) for page in self.pages[r].tolist()]) for r in rows}
        runs = [number_of_runs(pages) for pages in after.values()]
        touched = self.touched | rows
        if (
            sum(runs) >= sum(number_of_runs(self.pages[r]) for r in rows)
            or max(runs) > self.max_runs
            or len(self.moved) + len(going) > self.limits.moves
            or self.entries + entries > self.limits.entries
            or sum(len(self.pages[r]) for r in touched) > self.limits.pages
        ):
            return
        self.stretches.remove(stretch)
        if length > len(going):
            self.stretches.append((start + len(going), length - len(going)))
        self.pages |= after
        self.moved |= proposal
        self.targets |= set(proposal.values())
        self.touched, self.entries = touched, self.entries + entries

    def moves(self) -> Moves:
        """The moves in lists of the limits' sizes."""
        source, target = (np.full(self.limits.moves, self.num_pages, np.int32) for _ in range(2))
        source[: len(self.moved)], target[: len(self.moved)] = list(self.moved), list(self.moved.values())
        row = np.full(self.limits.entries, self.rows, np.int32)
        logical, move = np.zeros(self.limits.entries, np.int32), np.zeros(self.limits.entries, np.int32)
        listed = [(*holder, number) for number, page in enumerate(self.moved) for holder in self.holders[page]]
        row[: len(listed)], logical[: len(listed)], move[: len(listed)] = np.array(listed, np.int32).T
        return Moves(*map(jnp.asarray, (source, target, row, logical, move)))


def _stretches(group: GroupPages) -> list[tuple[int, int]]:
    """(start, length) of each stretch of free pages."""
    where = (int(group.head) + np.arange(int(group.free))) % group.num_pages
    free = np.sort(group.ring[where])
    parts = np.split(free, np.flatnonzero(np.diff(free) != 1) + 1) if len(free) else []
    return [(int(part[0]), len(part)) for part in parts]
