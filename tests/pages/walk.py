"""A random walk over every operation: what the long run, the model test and the broken twins are driven by."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.pages.harness import MAX_EPOCHS, NO_PAGE, PIN_IDS, SETTINGS, Harness

WEIGHTS = {
    "reserve": 8, "commit": 8, "truncate": 2, "release": 3, "fork": 4, "reorder": 2, "adopt": 2, "pin": 1, "unpin": 1,
    "advance": 4,
}  # fmt: skip
NAMES, CHANCES = list(WEIGHTS), np.array([*WEIGHTS.values()]) / sum(WEIGHTS.values())


class RandomWalk:
    """Random operations on a harness; the seed and the setting's name tell the whole walk."""

    def __init__(self, setting: str, seed: int, operations: dict[str, Any] | None = None) -> None:
        self.harness = Harness(SETTINGS[setting], operations)
        self.random = np.random.default_rng(seed)

    def step(self) -> None:
        """One random operation, and the comparison."""
        name = NAMES[self.random.choice(len(NAMES), p=CHANCES)]
        getattr(self.harness, name)(*getattr(self, f"_{name}")())
        self.harness.compare()

    def _some(self, chance: float) -> np.ndarray:
        return self.random.random(self.harness.rows) < chance

    def _reserve(self) -> tuple[list[int], list[int] | None]:
        rows, limit = self.harness.rows, self.harness.setting.max_tokens
        most = max(5, 3 * limit // rows) if self.random.random() < 0.8 else 2
        tokens = self.random.integers(0, most, rows) * self._some(0.7)
        if self.random.random() < 0.1:
            tokens[self.random.integers(rows)] = self.random.choice([-1, -(2**31), limit + 1, 2**31 - 1])
        order = self.random.integers(-3, 3, rows).tolist() if self.random.random() < 0.5 else None
        return tokens.tolist(), order

    def _commit(self) -> tuple[list[int]]:
        counts = []
        for row, written in zip(self.harness.model.rows, self.harness.written, strict=True):
            available = len(written) if self.random.random() < 0.9 else 0
            some = self.random.integers(0, available + 1) if self.random.random() < 0.3 else available
            if self.random.random() < 0.03:
                some = self.random.choice([-1, row.reserved - row.length + 1])
            counts.append(int(some))
        return (counts,)

    def _truncate(self) -> tuple[list[int], list[bool]]:
        length = [int(self.random.integers(-1, row.length + 2)) for row in self.harness.model.rows]
        return length, self._some(0.5 if self.harness.rows < 10 else 0.15).tolist()

    def _release(self) -> tuple[list[bool]]:
        return (self._some(0.3 if self.harness.rows < 10 else 0.15).tolist(),)

    def _fork(self) -> tuple[list[int]]:
        rows = self.harness.rows
        return (self.random.integers(-1, rows + 1, rows).tolist(),)

    def _reorder(self) -> tuple[list[int]]:
        rows = self.harness.rows
        anyone = self.random.integers(0, rows + (self.random.random() < 0.2), rows)
        return (np.where(self._some(0.5), np.arange(rows), anyone).tolist(),)

    def _adopt(self) -> tuple[list[int], list[int], list[tuple[int, int] | None]]:
        model, rows = self.harness.model.rows, self.harness.rows
        donor, tokens, spoiled = [-1] * rows, [0] * rows, [None] * rows
        donors = [r for r, row in enumerate(model) if row.length]
        for r in range(rows):
            if donors and self.random.random() < 0.5:
                donor[r] = int(self.random.choice(donors))
                tokens[r] = int(self.random.integers(1, model[donor[r]].length + 1))
                if self.random.random() < 0.1:
                    g = int(self.random.integers(len(self.harness.shapes)))
                    spoiled[r] = (g, self._not_held(g))
            elif self.random.random() < 0.05:
                tokens[r] = int(self.random.choice([-1, 2**31 - 1]))
        return donor, tokens, spoiled

    def _not_held(self, group: int) -> int:
        pages = self.harness.view.groups[group]
        unheld = np.flatnonzero(pages.refcount == 0)
        return int(self.random.choice([-1, pages.num_pages + 1, 2**30, *unheld[:1]]))

    def _pin(self) -> tuple[list[list[tuple[int, int]]]]:
        return ([[self._page_to_pin(g) for _ in range(PIN_IDS)] for g in range(len(self.harness.shapes))],)

    def _page_to_pin(self, group: int) -> tuple[int, int]:
        model = self.harness.model.rows
        holding = [r for r, row in enumerate(model) if row.pages[group]]
        if holding and self.random.random() < 0.6:
            row = int(self.random.choice(holding))
            return row, int(self.random.integers(len(model[row].pages[group])))
        return (-1, self._not_held(group)) if self.random.random() < 0.3 else NO_PAGE

    def _unpin(self) -> tuple[list[list[int]]]:
        wanted = []
        for g, group in enumerate(self.harness.view.groups):
            mine = [index for index, pin in enumerate(self.harness.pinned) if pin.group == g]
            entries = self.random.permutation(mine)[: self.random.integers(0, PIN_IDS)].astype(int).tolist()
            unpinned = np.flatnonzero(group.pins == 0)
            if self.random.random() < 0.2 and unpinned.size:
                entries.append(~int(unpinned[0]))
            wanted.append(entries)
        return (wanted,)

    def _advance(self) -> tuple[int]:
        return (0 if self.random.random() < 0.6 else int(self.random.integers(-1, MAX_EPOCHS + 2)),)
