"""Making what a row holds show at its addresses: what table and mapping differ in, in as few calls as it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int, Int32

from kvjax.virtual.figures import Counters
from kvjax.virtual.substrate import AddressRange


class Mapping:
    """Maps page-groups through an `AddressRange`, counts and times the calls.

    Attributes:
      range: the addresses.
      none: the page number that means nothing is mapped.
      ahead: the calls are made by the background thread.
    """

    def __init__(self, range: AddressRange, *, none: int, counters: Counters):
        self.range, self.none, self.ahead = range, none, False
        self._counters = counters

    def differs(self, place: int, pages: Int32[np.ndarray, " n"]) -> Int[np.ndarray, " wrong"]:
        """Which of the places from `place` on do not show these pages."""
        return np.flatnonzero(self.range.mapped[place : place + len(pages)] != pages)

    def replaces(self, place: int, pages: Int32[np.ndarray, " n"]) -> bool:
        """Whether showing these pages would take away others that are mapped there now."""
        current = self.range.mapped[place : place + len(pages)]
        return bool(np.any((current != pages) & (current != self.none)))

    def show(self, place: int, pages: Int32[np.ndarray, " n"]) -> bool:
        """Maps these pages at the places from `place` on; all, or none if the platform refuses one."""
        before = self.range.mapped[place : place + len(pages)].copy()
        wrong = self.differs(place, pages)
        for at, page, count in runs(place + wrong, pages[wrong]):
            if not self._map(at, page, count):
                self._put_back(place, before)
                return False
        return True

    def clear(self, place: int, count: int) -> bool:
        """Takes away what is mapped at places [place, place + count), in one call; False if the platform refuses."""
        mapped = np.flatnonzero(self.range.mapped[place : place + count] != self.none)
        if not len(mapped):
            return True
        first, last = int(mapped[0]), int(mapped[-1])
        start = time.perf_counter()
        done = self.range.unmap(place + first, last - first + 1)
        self._counters.unmap_calls += 1
        self._count_time(time.perf_counter() - start)
        return done

    def _map(self, place: int, page: int, count: int) -> bool:
        start = time.perf_counter()
        done = self.range.map(place, page, count)
        self._counters.map_calls += 1
        self._counters.mapped_pages += count if done else 0
        self._counters.ahead_calls += self.ahead
        self._count_time(time.perf_counter() - start)
        return done

    def _put_back(self, place: int, before: Int32[np.ndarray, " n"]) -> None:
        """Undoes a part of a `show`: the same areas as before, so there is room for them."""
        wrong = self.differs(place, before)
        pages = before[wrong]
        nothing = pages == self.none
        undone = [self.range.unmap(int(place + index), 1) for index in wrong[nothing]]
        undone += [self._map(*run) for run in runs(place + wrong[~nothing], pages[~nothing])]
        if not all(undone):
            raise OSError("the platform refused to restore a mapping that it had a moment ago")

    def _count_time(self, seconds: float) -> None:
        self._counters.map_seconds += seconds
        self._counters.ahead_seconds += seconds if self.ahead else 0.0


def runs(places: Int[np.ndarray, " n"], pages: Int[np.ndarray, " n"]) -> Iterator[tuple[int, int, int]]:
    """(place, page, count) of each stretch of consecutive places that shows consecutive pages."""
    if len(places):
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(pages) != 1)) + 1
        for part in np.split(np.arange(len(places)), breaks):
            yield int(places[part[0]]), int(pages[part[0]]), len(part)
