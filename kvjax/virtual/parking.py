"""Rows that no request uses but whose page-groups are still mapped: deferred reclamation (vAttention, §6.2).

Mapping costs more than ownership does, so a finished row is parked: its page-groups stay where they are, held by a pin,
for the next request that fits.  They are given up when others need them, coldest row first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True, slots=True)
class Parked:
    """What one row keeps.

    Attributes:
      start: the row's first page-group that is kept; those before it were shared, and went with the others' holders.
      pages: page-groups `start`, `start` + 1, … of the row, mapped there and pinned once.
      since: a counter's value when it was parked; the smallest is the coldest.
    """

    start: int
    pages: Int32[np.ndarray, " kept"]
    since: int

    @property
    def end(self) -> int:
        return self.start + len(self.pages)

    def from_index(self, index: int) -> Int32[np.ndarray, " usable"]:
        """The kept page-groups that follow on a prefix of `index` page-groups; none if there is a gap."""
        return self.pages[index - self.start :] if self.start <= index < self.end else self.pages[:0]


def coldest(parked: dict[int, Parked], except_for: Iterable[int] = ()) -> int | None:
    """The row parked longest ago."""
    rows = [row for row in parked if row not in except_for]
    return min(rows, key=lambda row: parked[row].since, default=None)


def best_fit(parked: dict[int, Parked], free_rows: Iterable[int], need: int, shared: int) -> int | None:
    """The row for a request that needs `need` page-groups, the first `shared` of them shared with another row.

    The least sufficient row, or the one that has most; None if no row is free.
    """

    def key(row: int) -> tuple[bool, int]:
        kept = parked.get(row)
        usable = 0 if kept is None else len(kept.from_index(shared))
        missing = max(need - shared, 0) - usable
        return missing > 0, abs(missing)

    return min(free_rows, key=key, default=None)
