"""The real table and the plain model side by side, given the same operations and compared after each.

Operations come as plain Python values, so that a random walk, a state machine and a replayed failure can all drive it.
Between the two stands a memory of tokens that only the real table addresses: what a row should hold is known from the
model, where it lies is read from the table, and each position must hold what was last written there for that row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import chex
import jax
import numpy as np

from kvjax import pages
from kvjax.pages import GroupShape, PageTable, Status
from tests.pages.model import Model, Page

UNWRITTEN = -7
MAX_EPOCHS = 4
PIN_IDS = 3
"""Ids a call of pin or unpin names in each group."""

NO_PAGE = (-1, 0)
"""What stands for "no page" among the (row, logical page) or (-1, id) pairs that `pin` and `unpin` take."""


@dataclass(frozen=True)
class Setting:
    """The sizes of one table and the static bounds of the calls on it."""

    shapes: tuple[GroupShape, ...]
    rows: int = 5
    max_tokens: int = 12
    max_pages: int = 6


SETTINGS = {
    "one page": Setting((GroupShape(1, 4, 2),)),
    "small pages": Setting((GroupShape(13, 1, 9),), max_pages=10),
    "uniform": Setting((GroupShape(14, 4, 5),)),
    "large pages": Setting((GroupShape(8, 256, 3),), max_tokens=700, max_pages=4),
    "two groups": Setting((GroupShape(16, 3, 6), GroupShape(9, 5, 4))),
    "state and window": Setting((GroupShape(4, 64, 1), GroupShape(20, 2, 9)), max_pages=10),
    "many rows": Setting((GroupShape(400, 4, 9), GroupShape(180, 16, 3)), rows=128, max_tokens=320, max_pages=240),
    "many rows, few pages": Setting((GroupShape(80, 2, 12),), rows=128, max_tokens=320, max_pages=80),
}
"""A small fixed set, so that nothing recompiles: pools from one page up, pages of 1 to 256 positions, two groups."""


def fresh(name: str) -> Any:
    """A transition as it is now, jitted afresh: a function patched for a test is traced, not remembered."""
    static = ("max_tokens",) if name in ("reserve", "pages_needed") else ("max_pages",) if name in BOUNDED else ()
    return jax.jit(lambda *args, **kwargs: getattr(pages, name)(*args, **kwargs), static_argnames=static)


BOUNDED = ("truncate", "release", "fork", "reorder", "adopt")
OPERATIONS = ("reserve", "pages_needed", "commit", "pin", "unpin", "advance", *BOUNDED)


@cache
def compiled() -> dict[str, Any]:
    """The transitions, jitted once for all tests of a process."""
    return {name: fresh(name) for name in OPERATIONS}


class Harness:
    """Applies each operation to both, compares statuses and results, and then everything else with `compare`.

    `transitions` counts rows' parts in operations: rows that were asked to do something, or ids that were named.
    """

    def __init__(self, setting: Setting, operations: dict[str, Any] | None = None) -> None:
        self.setting, self.shapes = setting, setting.shapes
        self.operations = compiled() if operations is None else operations
        self.table = pages.make_page_table(self.shapes, rows=setting.rows, max_epochs=MAX_EPOCHS)
        self.model = Model(self.shapes, setting.rows, MAX_EPOCHS)
        self.view = jax.tree.map(np.asarray, self.table)
        self.memory = [np.full((s.num_pages, s.page_size), UNWRITTEN) for s in self.shapes]
        self.dropped_in = [np.full(s.num_pages, -1) for s in self.shapes]  # the epoch in which each page was dropped
        self.pinned: list[Pin] = []
        self.next_token = 0
        self.written: list[list[int]] = [[] for _ in range(setting.rows)]  # tokens written but not committed
        self.counts: Counter[str] = Counter()
        self.transitions = 0

    @property
    def rows(self) -> int:
        return self.setting.rows

    def reserve(self, tokens: Sequence[int], order: Sequence[int] | None = None) -> None:
        """Reserves, copies what is to be copied, and writes a new token into each granted position."""
        limit = self.setting.max_tokens
        arguments = (self.table, np.array(tokens, np.int32))
        keywords = {"max_tokens": limit, "order": None if order is None else np.array(order, np.int32)}
        needed, predicted = self.operations["pages_needed"](*arguments, **keywords)
        free = [int(group.free) for group in self.view.groups]
        table, info = self.operations["reserve"](*arguments, **keywords)
        expected, used = self.model.reserve(list(tokens), limit, None if order is None else list(order))
        self._expect("reserve", info.status, expected)
        self._expect("pages_needed", predicted, expected)
        served = np.array([code == Status.OK for code in expected]) & (np.array(tokens) > 0)
        chex.assert_trees_all_equal(np.asarray(info.tokens), np.where(served, tokens, 0).astype(np.int32))
        self._settle("reserve", table, np.count_nonzero(tokens))
        taken = [before - int(group.free) for before, group in zip(free, self.view.groups, strict=True)]
        predicted_pages = [int(np.asarray(n)[served].sum()) for n in needed]
        assert taken == used == predicted_pages, f"took {taken} pages, model {used}, predictor {predicted_pages}"
        for memory, copy in zip(self.memory, info.copies, strict=True):  # before the new table is used
            some = np.asarray(copy.source) < len(memory)
            memory[np.asarray(copy.target)[some]] = memory[np.asarray(copy.source)[some]]
            self.counts["copies"] += int(some.sum())
        for row in np.flatnonzero(served):
            self.written[row] = list(range(self.next_token, self.next_token + tokens[row]))
            self.next_token += tokens[row]
        self._write(np.flatnonzero(served).tolist())

    def _write(self, rows: list[int]) -> None:
        row, position, token = _flat(rows, [self.model.rows[r].length for r in rows], [self.written[r] for r in rows])
        for memory, group in zip(self.memory, self.view.groups, strict=True):
            page = group.pages[row, position // group.page_size % group.width]
            assert (page < group.num_pages).all(), "a granted position has no page"
            memory[page, position % group.page_size] = token

    def commit(self, tokens: Sequence[int]) -> None:
        """Commits so many tokens of each row; what was not written may be given too, and is to be refused."""
        new = [self.written[r][:n] + [UNWRITTEN] * (n - len(self.written[r])) for r, n in enumerate(tokens)]
        expected = self.model.commit([None if n < 0 else mine for n, mine in zip(tokens, new, strict=True)])
        table, info = self.operations["commit"](self.table, np.array(tokens, np.int32))
        self._expect("commit", info.status, expected)
        for r, code in enumerate(expected):
            if code == Status.OK:
                self.written[r] = self.written[r][tokens[r] :]
        self._settle("commit", table, np.count_nonzero(tokens))

    def truncate(self, length: Sequence[int], chosen: Sequence[bool]) -> None:
        expected = self.model.truncate(list(length), self.setting.max_pages, list(chosen))
        self._bounded("truncate", expected, sum(chosen), np.array(length, np.int32), rows=np.array(chosen))

    def release(self, chosen: Sequence[bool]) -> None:
        expected = self.model.release(list(chosen), self.setting.max_pages)
        self._bounded("release", expected, sum(chosen), np.array(chosen))

    def fork(self, parent: Sequence[int]) -> None:
        expected = self.model.fork(list(parent), self.setting.max_pages)
        children = sum(0 <= p < self.rows for p in parent)
        self._bounded("fork", expected, children, np.array(parent, np.int32))

    def reorder(self, parent: Sequence[int]) -> None:
        expected = self.model.reorder(list(parent), self.setting.max_pages)
        moved = sum(p != row for row, p in enumerate(parent))
        self._bounded("reorder", expected, moved, np.array(parent, np.int32))

    def adopt(self, donor: Sequence[int], tokens: Sequence[int], spoiled: Sequence[tuple[int, int] | None]) -> None:
        """Row r adopts the first `tokens[r]` positions of row donor[r], and so is given that row's pages.

        donor[r] = −1: it is given no page.  spoiled[r] = (group, id): that id, which nobody holds, comes first.
        """
        lists = [np.full((self.rows, s.width), s.num_pages, np.int32) for s in self.shapes]
        for r, source in enumerate(donor):
            for group, ids in zip(self.view.groups, lists, strict=True):
                if source >= 0:
                    ids[r] = group.pages[source]
            if spoiled[r] is not None:
                lists[spoiled[r][0]][r, 0] = spoiled[r][1]
        bad = [one is not None for one in spoiled]
        expected = self.model.adopt(list(donor), list(tokens), self.setting.max_pages, bad)
        self._bounded("adopt", expected, np.count_nonzero(tokens), tuple(lists), np.array(tokens, np.int32))

    def _bounded(self, name: str, expected: list[Status], parts: int, *arguments: Any, **keywords: Any) -> None:
        table, info = self.operations[name](self.table, *arguments, max_pages=self.setting.max_pages, **keywords)
        self._expect(name, info.status, expected)
        for r, row in enumerate(self.model.rows):
            self.written[r] = self.written[r][: row.reserved - row.length]
        self._settle(name, table, parts)

    def pin(self, wanted: Sequence[Sequence[tuple[int, int]]]) -> None:
        """For each group PIN_IDS pairs: (row, logical page), which must be mapped, or (−1, id) with an id not held."""
        lists, statuses, taken = [], [], []
        for g, (group, pairs) in enumerate(zip(self.view.groups, wanted, strict=True)):
            ids, expected = [], []
            for row, index in pairs:
                if row < 0:
                    ids.append(group.num_pages if (row, index) == NO_PAGE else index)
                    expected.append(Status.OK if ids[-1] == group.num_pages else Status.STALE)
                else:
                    ids.append(int(group.pages[row, index]))
                    expected.append(Status.OK)
                    taken.append(self._pin_of(g, row, index, ids[-1]))
            lists.append(np.array(ids, np.int32))
            statuses.append(expected)
        table, info = self.operations["pin"](self.table, tuple(lists))
        for status, expected in zip(info.status, statuses, strict=True):
            self._expect("pin", status, expected)
        for pin in taken:
            self.model.pin(pin.page)
        self.pinned += taken
        self._settle("pin", table, sum(pair != NO_PAGE for pairs in wanted for pair in pairs))

    def _pin_of(self, group: int, row: int, index: int, physical: int) -> Pin:
        size, mine = self.shapes[group].page_size, self.model.rows[row]
        content = np.array(mine.tokens[index * size : (index + 1) * size], int)
        return Pin(group, mine.pages[group][index], physical, content)

    def unpin(self, wanted: Sequence[Sequence[int]]) -> None:
        """For each group up to PIN_IDS entries: an index into `pinned`, none twice, or ~id of a page without pins."""
        lists, statuses, gone = [], [], []
        for group, entries in zip(self.view.groups, wanted, strict=True):
            ids = [self.pinned[entry].physical if entry >= 0 else ~entry for entry in entries]
            gone += [self.pinned[entry] for entry in entries if entry >= 0]
            statuses.append([Status.OK if entry >= 0 else Status.STALE for entry in entries])
            statuses[-1] += [Status.OK] * (PIN_IDS - len(ids))
            lists.append(np.array(ids + [group.num_pages] * (PIN_IDS - len(ids)), np.int32))
        table, info = self.operations["unpin"](self.table, tuple(lists))
        for status, expected in zip(info.status, statuses, strict=True):
            self._expect("unpin", status, expected)
        for pin in gone:
            self.pinned.remove(pin)
            self.model.unpin(pin.group, pin.page)
        self._settle("unpin", table, sum(map(len, wanted)))

    def advance(self, behind: int) -> None:
        """Says that the epoch `behind` the open one is complete."""
        completed = self.model.epoch - behind
        table, info = self.operations["advance"](self.table, np.int32(completed))
        self._expect("advance", [info.status], [self.model.advance(completed)])
        self._settle("advance", table, 1)

    def _expect(self, name: str, status: Any, expected: list[Status]) -> None:
        got = np.asarray(status).tolist()
        assert got == expected, f"{name}: {[Status(code) for code in got]} where the model says {expected}"
        self.counts.update(f"{name}:{code.name}" for code in expected)

    def _settle(self, name: str, table: PageTable, parts: int) -> None:
        """Takes the new table, and checks that each page that came into use was free to."""
        before, self.table, self.view = self.view, table, jax.tree.map(np.asarray, table)
        for dropped_in, old, new in zip(self.dropped_in, before.groups, self.view.groups, strict=True):
            reused = (old.refcount == 0) & (new.refcount > 0)
            early = np.flatnonzero(reused & (dropped_in > int(before.completed)))
            assert not early.size, f"page {early[0]} was reused before epoch {dropped_in[early[0]]} was complete"
            dropped_in[(old.refcount > 0) & (new.refcount == 0)] = int(before.epoch)
        self.counts[name] += 1
        self.transitions += int(parts)

    def compare(self) -> None:
        """Invariants, counts, page identity, and the content of every committed or pinned position."""
        assert pages.check_invariants(self.view) == []
        model = self.model.rows
        chex.assert_trees_all_equal(self.view.length, np.array([row.length for row in model], np.int32))
        chex.assert_trees_all_equal(self.view.reserved, np.array([row.reserved for row in model], np.int32))
        everybody = range(self.rows)
        tokens = [row.tokens + mine for row, mine in zip(model, self.written, strict=True)]
        row, position, token = _flat(everybody, [0] * self.rows, tokens)
        for g, (group, memory) in enumerate(zip(self.view.groups, self.memory, strict=True)):
            assert (int(group.free), int(group.limbo)) == (self.model.free[g], self.model.limbo[g]), "free or limbo"
            assert group.end.tolist() == [len(one.pages[g]) for one in model], "mapped pages"
            found = memory[group.pages[row, position // group.page_size], position % group.page_size]
            lost = np.flatnonzero(found != token)
            assert not lost.size, f"group {g} row {row[lost[0]]} position {position[lost[0]]} lost its content"
            self._compare_identity(g, group)
        for pin in self.pinned:
            kept = self.memory[pin.group][pin.physical, : len(pin.content)]
            assert (kept == pin.content).all(), f"group {pin.group} page {pin.physical} changed while pinned"

    def _compare_identity(self, g: int, group: pages.GroupPages) -> None:
        """One page of the model is one page of the table, with as many holders."""
        held = [page for row in self.model.rows for page in row.pages[g]]
        row, index, _ = _flat(range(self.rows), [0] * self.rows, [one.pages[g] for one in self.model.rows], len(held))
        number = np.concatenate([group.pages[row, index], [pin.physical for pin in self.pinned if pin.group == g]])
        held += [pin.page for pin in self.pinned if pin.group == g]
        number = number.astype(int)
        pairs = set(zip(number.tolist(), (page.serial for page in held), strict=True))
        distinct = {page.serial for page in held}
        assert len(pairs) == len(set(number.tolist())) == len(distinct), "a page has two places, or a place two pages"
        assert group.refcount[number].tolist() == [page.holders for page in held], "refcounts"


@dataclass(eq=False)
class Pin:
    """A pin that was taken, and the committed tokens that its page held then."""

    group: int
    page: Page
    physical: int
    content: np.ndarray


def _flat(
    rows: Sequence[int], start: Sequence[int], values: Sequence[Sequence[Any]], length: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, start + index, value) of all values in one list each; no values if `length` is given."""
    counts = np.array([len(mine) for mine in values], int)
    begins = np.cumsum(counts) - counts
    row = np.repeat(np.array(rows, int), counts)
    position = np.arange(counts.sum()) - np.repeat(begins - np.array(start, int), counts)
    flat = np.empty(0, int) if length is not None else np.array([one for mine in values for one in mine], int)
    return row, position, flat
