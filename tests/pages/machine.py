"""Every operation as a rule of a Hypothesis state machine, whose failures shrink to a shortest sequence.

Values are drawn so that smaller means less: zero is a row left alone, and what depends on the state (how much of a row
to keep, whose pages to take) is drawn as a distance from doing nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.pages.harness import MAX_EPOCHS, NO_PAGE, PIN_IDS, SETTINGS, Harness

ROWS, GROUPS = 5, 2
MACHINE_SETTINGS = ("two groups", "one page", "large pages")


def each_row(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=ROWS, max_size=ROWS)


def each_group(strategy: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[list[Any]]]:
    return st.lists(st.lists(strategy, max_size=most), min_size=GROUPS, max_size=GROUPS)


COUNTS = each_row(st.one_of(st.integers(0, 4), st.sampled_from([5, 6, 255, 256, 257, 700, 701, 2**31 - 1, -1])))
CHOICES = each_row(st.booleans())


class PageTableMachine(RuleBasedStateMachine):
    """The page table against the plain model."""

    operations: ClassVar[dict[str, Any] | None] = None
    """The jitted transitions; those of the process if None."""

    @initialize(setting=st.sampled_from(MACHINE_SETTINGS))
    def start(self, setting: str) -> None:
        self.harness = Harness(SETTINGS[setting], self.operations)

    @property
    def rows(self) -> list[Any]:
        return self.harness.model.rows

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "harness"):
            self.harness.compare()

    @rule(tokens=COUNTS, order=st.none() | each_row(st.integers(-2, 2)))
    def reserve(self, tokens: list[int], order: list[int] | None) -> None:
        self.harness.reserve(tokens, order)

    @rule(kept_back=each_row(st.integers(-1, 3)))
    def commit(self, kept_back: list[int]) -> None:
        """All that was written but a few; −1 is one more than was reserved."""
        counts = [
            row.reserved - row.length + 1 if back < 0 else max(0, len(written) - back)
            for row, written, back in zip(self.rows, self.harness.written, kept_back, strict=True)
        ]
        self.harness.commit(counts)

    @rule(back=each_row(st.integers(-1, 5)), chosen=CHOICES)
    def truncate(self, back: list[int], chosen: list[bool]) -> None:
        self.harness.truncate([row.length - n for row, n in zip(self.rows, back, strict=True)], chosen)

    @rule(chosen=CHOICES)
    def release(self, chosen: list[bool]) -> None:
        self.harness.release(chosen)

    @rule(parent=each_row(st.integers(0, ROWS)))
    def fork(self, parent: list[int]) -> None:
        self.harness.fork([ROWS - p for p in parent])

    @rule(shift=each_row(st.integers(0, ROWS)))
    def reorder(self, shift: list[int]) -> None:
        self.harness.reorder([(row + n) % (ROWS + 1) for row, n in enumerate(shift)])

    @rule(donor=each_row(st.integers(-1, ROWS - 1)), given=each_row(st.integers(0, 9)), spoiled=CHOICES)
    def adopt(self, donor: list[int], given: list[int], spoiled: list[bool]) -> None:
        tokens = [min(n, self.rows[d].length) if d >= 0 else 0 for d, n in zip(donor, given, strict=True)]
        bad = [(0, -1) if one and n else None for one, n in zip(spoiled, tokens, strict=True)]
        self.harness.adopt(donor, tokens, bad)

    @rule(picks=each_group(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 9)), PIN_IDS))
    def pin(self, picks: list[list[tuple[int, int]]]) -> None:
        wanted = []
        for g in range(len(self.harness.shapes)):
            mapped = [(row, len(self.rows[row].pages[g]), index) for row, index in picks[g]]
            pairs = [(row, index % count) for row, count, index in mapped if count]
            wanted.append(pairs + [NO_PAGE] * (PIN_IDS - len(pairs)))
        self.harness.pin(wanted)

    @rule(picks=each_group(st.integers(0, 9), PIN_IDS))
    def unpin(self, picks: list[list[int]]) -> None:
        wanted = []
        for g in range(len(self.harness.shapes)):
            mine = [index for index, pin in enumerate(self.harness.pinned) if pin.group == g]
            wanted.append(list(dict.fromkeys(mine[pick % len(mine)] for pick in picks[g] if mine)))
        self.harness.unpin(wanted)

    @rule(behind=st.integers(-1, MAX_EPOCHS + 1))
    def advance(self, behind: int) -> None:
        self.harness.advance(behind)
