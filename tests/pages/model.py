"""A plain Python model of the page table: one row at a time, Python objects for pages, tokens themselves as content.

It follows the contract's words, not the implementation: a page is an object with a set of holders, a row is a list of
pages and a list of tokens, and every operation is a loop.  `Harness` drives it and the real table side by side, keeps a
memory of tokens that only the real table addresses, and compares all of it after each step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import pages
from kvjax.pages import GroupShape, Status


class Page:
    """A page that somebody holds or held; identity is what counts."""

    def __init__(self) -> None:
        self.rows = 0
        self.pins = 0

    @property
    def holders(self) -> int:
        return self.rows + self.pins


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    reserved: int = 0
    pages: list[list[Page]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)


class Model:
    """The contract of `kvjax.pages`, executed row by row."""

    def __init__(self, shapes: tuple[GroupShape, ...], rows: int) -> None:
        self.shapes = shapes
        self.rows = [Row(pages=[[] for _ in shapes]) for _ in range(rows)]
        self.free = [shape.num_pages for shape in shapes]
        self.dropped: list[list[int]] = [[0] * len(shapes)]  # pages dropped in each epoch; the last one is open
        self.completed = -1

    @property
    def limbo(self) -> list[int]:
        return [sum(epoch[group] for epoch in self.dropped[self.completed + 1 :]) for group in range(len(self.shapes))]

    def _drop(self, group: int, page: Page) -> None:
        page.rows -= 1
        self._orphan(group, page)

    def _orphan(self, group: int, page: Page) -> None:
        if page.holders == 0:
            self.dropped[-1][group] += 1

    def reserve(self, tokens: list[int], max_tokens: int, order: list[int] | None) -> tuple[list[Status], list[int]]:
        """Statuses, and pages needed a group, in row order."""
        sequence = sorted(range(len(self.rows)), key=lambda row: (order[row] if order else 0, row))
        status: list[Status] = [Status.OK] * len(self.rows)
        capacity = min(shape.width * shape.page_size for shape in self.shapes)
        total, asking = 0, []
        for r in sequence:
            if tokens[r] > capacity - self.rows[r].length:
                status[r] = Status.TABLE_FULL
            elif not 0 <= tokens[r] <= max_tokens:
                status[r] = Status.OVER_BOUND
            elif tokens[r]:
                total += tokens[r]
                if total > max_tokens:
                    status[r] = Status.OVER_BOUND
                else:
                    asking.append(r)
        entry_holders = {}
        writers: dict[tuple[int, int], list[int]] = {}
        tails: dict[tuple[int, int], Page] = {}
        for r in asking:
            for g, shape in enumerate(self.shapes):
                index = self.rows[r].length // shape.page_size
                if index < len(self.rows[r].pages[g]):
                    page = self.rows[r].pages[g][index]
                    tails[r, g] = page
                    entry_holders[id(page)] = page.holders
                    writers.setdefault((g, id(page)), []).append(r)
        free, limbo, optimistic = self.free, self.limbo, [0] * len(self.shapes)
        used, stopped, served = [0] * len(self.shapes), False, set()
        for r in asking:
            row, need, hoped = self.rows[r], [], []
            for g, shape in enumerate(self.shapes):
                fresh = max(0, -(-(row.length + tokens[r]) // shape.page_size) - len(row.pages[g]))
                page = tails.get((r, g))
                copy = may_keep = False
                if page is not None and entry_holders[id(page)] > 1:
                    others = [w for w in writers[g, id(page)] if w != r]
                    may_keep = writers[g, id(page)][-1] == r and len(others) + 1 == entry_holders[id(page)]
                    copy = not (may_keep and all(w in served for w in others))
                need.append(fresh + copy)
                hoped.append(fresh + (copy and not may_keep))
            optimistic = [a + b for a, b in zip(optimistic, hoped, strict=True)]
            lacking = any(u + n > f for u, n, f in zip(used, need, free, strict=True))
            if any(need) and (stopped or lacking):
                stopped = True
                enough = all(o <= f + w for o, f, w in zip(optimistic, free, limbo, strict=True))
                status[r] = Status.PAGES_PENDING if enough else Status.OUT_OF_PAGES
                continue
            served.add(r)
            used = [u + n for u, n in zip(used, need, strict=True)]
        for r in asking:
            if r not in served:
                continue
            row = self.rows[r]
            for g, shape in enumerate(self.shapes):
                page = tails.get((r, g))
                if page is not None and entry_holders[id(page)] > 1:
                    others = [w for w in writers[g, id(page)] if w != r]
                    keep = writers[g, id(page)][-1] == r and len(others) + 1 == entry_holders[id(page)]
                    if not keep:
                        page.rows -= 1
                        row.pages[g][row.length // shape.page_size] = self._new(g)
                while len(row.pages[g]) * shape.page_size < row.length + tokens[r]:
                    row.pages[g].append(self._new(g))
            row.reserved = max(row.reserved, row.length + tokens[r])
        return status, used

    def _new(self, group: int) -> Page:
        self.free[group] -= 1
        assert self.free[group] >= 0
        page = Page()
        page.rows = 1
        return page

    def commit(self, tokens: list[list[int] | None]) -> list[Status]:
        """Appends each row's tokens; None stands for a negative count."""
        status = []
        for row, new in zip(self.rows, tokens, strict=True):
            if new is None or row.length + len(new) > row.reserved:
                status.append(Status.NOT_RESERVED)
                continue
            row.tokens += new
            status.append(Status.OK)
        return status

    def _shrink(self, wanted: list[tuple[int, int]], bound: int, status: list[Status]) -> None:
        totals = [0] * len(self.shapes)
        acting = []
        for r, kept in wanted:
            counts = [len(self.rows[r].pages[g]) - -(-kept // s.page_size) for g, s in enumerate(self.shapes)]
            over = False
            for g, count in enumerate(counts):
                if count > bound:
                    over = True
                else:
                    totals[g] += count
                    over |= count > 0 and totals[g] > bound
            if over:
                status[r] = Status.OVER_BOUND
            else:
                acting.append((r, kept))
        for r, kept in acting:
            row = self.rows[r]
            for g, shape in enumerate(self.shapes):
                while len(row.pages[g]) > -(-kept // shape.page_size):
                    self._drop(g, row.pages[g].pop())
            row.tokens, row.reserved = row.tokens[:kept], kept

    def truncate(self, length: list[int], bound: int, chosen: list[bool]) -> list[Status]:
        status, wanted = [Status.OK] * len(self.rows), []
        for r, row in enumerate(self.rows):
            if not chosen[r]:
                continue
            if not 0 <= length[r] <= row.length:
                status[r] = Status.NOT_RESERVED
            elif length[r] < row.reserved:
                wanted.append((r, length[r]))
        self._shrink(wanted, bound, status)
        return status

    def release(self, chosen: list[bool], bound: int) -> list[Status]:
        status, wanted = [Status.OK] * len(self.rows), []
        for r, row in enumerate(self.rows):
            if chosen[r] and not any(row.pages):
                status[r] = Status.EMPTY
            elif chosen[r]:
                wanted.append((r, 0))
        self._shrink(wanted, bound, status)
        return status

    def _take_over(self, moves: list[tuple[int, int | None]], bound: int, status: list[Status]) -> None:
        gains, losses, acting = [0] * len(self.shapes), [0] * len(self.shapes), []
        for r, parent in moves:
            over = False
            for g, shape in enumerate(self.shapes):
                gain = 0 if parent is None else -(-self.rows[parent].length // shape.page_size)
                for totals, count in ((gains, gain), (losses, len(self.rows[r].pages[g]))):
                    if count > bound:
                        over = True
                    else:
                        totals[g] += count
                        over |= count > 0 and totals[g] > bound
            if over:
                status[r] = Status.OVER_BOUND
            else:
                acting.append((r, parent))
        before = {r: (list(row.tokens), [list(p) for p in row.pages]) for r, row in enumerate(self.rows)}
        for r, parent in acting:  # everybody takes before anybody drops
            tokens, held = before[parent] if parent is not None else ([], [[] for _ in self.shapes])
            new = [p[: -(-len(tokens) // s.page_size)] for p, s in zip(held, self.shapes, strict=True)]
            for pages_of_group in new:
                for page in pages_of_group:
                    page.rows += 1
            self.rows[r] = Row(list(tokens), len(tokens), [list(p) for p in new])
        for r, _ in acting:
            for g, held in enumerate(before[r][1]):
                for page in held:
                    self._drop(g, page)

    def fork(self, parent: list[int], bound: int) -> list[Status]:
        status, moves = [Status.OK] * len(self.rows), []
        for r, p in enumerate(parent):
            if not 0 <= p < len(self.rows):
                continue
            if any(self.rows[r].pages):
                status[r] = Status.ROW_BUSY
            elif self.rows[p].reserved > self.rows[p].length:
                status[r] = Status.RESERVED
            elif not self.rows[p].length:
                status[r] = Status.EMPTY
            else:
                moves.append((r, p))
        self._take_over(moves, bound, status)
        return status

    def reorder(self, parent: list[int], bound: int) -> list[Status]:
        status: list[Status] = [Status.OK] * len(self.rows)
        moves: list[tuple[int, int | None]] = []
        for r, p in enumerate(parent):
            if not 0 <= p < len(self.rows):
                moves.append((r, None))
            elif p == r:
                continue
            elif self.rows[p].reserved > self.rows[p].length:
                status[r] = Status.RESERVED
            else:
                moves.append((r, p))
        self._take_over(moves, bound, status)
        return status

    def adopt(self, source: list[int | None], tokens: list[int], bound: int, spoiled: list[bool]) -> list[Status]:
        """Row r adopts the first `tokens[r]` positions of row source[r]; `spoiled` rows name a page nobody holds."""
        status, totals, acting = [Status.OK] * len(self.rows), [0] * len(self.shapes), []
        for r, n in enumerate(tokens):
            if n == 0:
                continue
            if n < 0:
                status[r] = Status.OVER_BOUND
            elif any(-(-n // s.page_size) > s.width for s in self.shapes):
                status[r] = Status.TABLE_FULL
            elif any(self.rows[r].pages):
                status[r] = Status.ROW_BUSY
            else:
                over = False
                for g, shape in enumerate(self.shapes):
                    count = -(-n // shape.page_size)
                    if count > bound:
                        over = True
                    else:
                        totals[g] += count
                        over |= totals[g] > bound
                if over:
                    status[r] = Status.OVER_BOUND
                elif spoiled[r]:
                    status[r] = Status.STALE
                else:
                    acting.append(r)
        before = {r: (list(row.tokens), [list(p) for p in row.pages]) for r, row in enumerate(self.rows)}
        for r in acting:
            kept, held = before[source[r]]  # type: ignore[index]
            new = [p[: -(-tokens[r] // s.page_size)] for p, s in zip(held, self.shapes, strict=True)]
            for pages_of_group in new:
                for page in pages_of_group:
                    page.rows += 1
            self.rows[r] = Row(kept[: tokens[r]], tokens[r], [list(p) for p in new])
        return status

    def advance(self, completed: int) -> Status:
        epoch = len(self.dropped) - 1
        valid = self.completed <= completed <= epoch and epoch - completed < Harness.MAX_EPOCHS
        if valid:
            for g in range(len(self.shapes)):
                self.free[g] += sum(e[g] for e in self.dropped[self.completed + 1 : completed + 1])
            self.completed = completed
        self.dropped.append([0] * len(self.shapes))
        return Status.OK if valid else Status.STALE


def jitted() -> dict[str, Any]:
    """The transitions as they are now, jitted afresh: a function patched for a test is traced, not remembered."""

    def fresh(name: str, *static: str) -> Any:
        return jax.jit(lambda *args, **kwargs: getattr(pages, name)(*args, **kwargs), static_argnames=static)

    bounded = ("truncate", "release", "fork", "reorder", "adopt")
    return {
        **{name: fresh(name) for name in ("commit", "pin", "unpin", "advance")},
        **{name: fresh(name, "max_tokens") for name in ("reserve", "pages_needed")},
        **{name: fresh(name, "max_pages") for name in bounded},
    }


class Harness:
    """The real table and the model side by side, with one memory of tokens that only the table addresses."""

    MAX_EPOCHS = 4
    MAX_TOKENS = 12
    MAX_PAGES = 10
    UNWRITTEN = -7

    def __init__(self, shapes: tuple[GroupShape, ...], rows: int, seed: int, operations: dict[str, Any]) -> None:
        self.random = np.random.default_rng(seed)
        self.operations = operations
        self.shapes = shapes
        self.table = pages.make_page_table(shapes, rows=rows, max_epochs=self.MAX_EPOCHS)
        self.model = Model(shapes, rows)
        self.memory = [np.full((s.num_pages, s.page_size), self.UNWRITTEN) for s in shapes]
        self.pinned: list[tuple[int, Page, int]] = []  # group, page, physical id
        self.next_token = 0
        self.counts: Counter[str] = Counter()
        self.pending: list[list[int]] = [[] for _ in range(rows)]  # tokens written but not committed

    @property
    def rows(self) -> int:
        return len(self.model.rows)

    def step(self) -> None:
        """One random operation on both, and the comparison."""
        weights = {
            "reserve": 8, "commit": 8, "truncate": 2, "release": 3, "fork": 4, "reorder": 2, "adopt": 2,
            "pin": 1, "unpin": 1, "advance": 4,
        }  # fmt: skip
        names = list(weights)
        name = names[self.random.choice(len(names), p=np.array([*weights.values()]) / sum(weights.values()))]
        getattr(self, f"_{name}")()
        self.counts[name] += 1
        self.compare()

    def _expect(self, name: str, status: Any, expected: list[Status]) -> None:
        got = [Status(int(code)) for code in np.asarray(status)]
        assert got == expected, f"{name}: {got} where the model says {expected}"
        self.counts.update(f"{name}:{code.name}" for code in expected)

    def _reserve(self) -> None:
        tokens = self.random.integers(0, 5, self.rows) * (self.random.random(self.rows) < 0.7)
        if self.random.random() < 0.1:
            tokens[self.random.integers(self.rows)] = self.random.choice([-1, -(2**31), self.MAX_TOKENS + 1, 2**31 - 1])
        order = None
        if self.random.random() < 0.5:
            order = self.random.integers(-3, 3, self.rows)
        arguments = (self.table, jnp.asarray(tokens, jnp.int32))
        keywords = {"max_tokens": self.MAX_TOKENS, "order": None if order is None else jnp.asarray(order, jnp.int32)}
        needed, predicted = self.operations["pages_needed"](*arguments, **keywords)
        free = [int(group.free) for group in self.table.groups]
        self.table, info = self.operations["reserve"](*arguments, **keywords)
        expected, used = self.model.reserve(tokens.tolist(), self.MAX_TOKENS, None if order is None else order.tolist())
        self._expect("reserve", info.status, expected)
        self._expect("pages_needed", predicted, expected)
        served = (np.asarray(info.status) == Status.OK) & (tokens > 0)
        assert (np.asarray(info.tokens) == np.where(served, tokens, 0)).all()
        taken = [before - int(group.free) for before, group in zip(free, self.table.groups, strict=True)]
        assert taken == used == [int(np.asarray(n)[served].sum()) for n in needed], (taken, used, needed)
        for g, copy in enumerate(info.copies):  # before the new table is used
            for source, target in zip(np.asarray(copy.source), np.asarray(copy.target), strict=True):
                if source < self.shapes[g].num_pages:
                    self.memory[g][target] = self.memory[g][source]
                    self.counts["copies"] += 1
        for r in np.flatnonzero(served):
            self.pending[r] = [self._fresh_token() for _ in range(tokens[r])]
            self._write(r, self.model.rows[r].length, self.pending[r])

    def _fresh_token(self) -> int:
        self.next_token += 1
        return self.next_token

    def _write(self, row: int, start: int, tokens: list[int]) -> None:
        for g, group in enumerate(self.table.groups):
            entries = np.asarray(group.pages[row])
            for position, token in enumerate(tokens, start):
                page = entries[position // group.page_size % group.width]
                self.memory[g][page, position % group.page_size] = token

    def _commit(self) -> None:
        counts, tokens = np.zeros(self.rows, int), []
        for r in range(self.rows):
            available = len(self.pending[r]) if self.random.random() < 0.9 else 0
            counts[r] = self.random.integers(0, available + 1) if self.random.random() < 0.3 else available
            new: list[int] | None = self.pending[r][: counts[r]]
            if self.random.random() < 0.03:
                slack = self.model.rows[r].reserved - self.model.rows[r].length
                counts[r] = self.random.choice([-1, slack + 1])
                new = None if counts[r] < 0 else [0] * counts[r]
            tokens.append(new)
        self.table, info = self.operations["commit"](self.table, jnp.asarray(counts, jnp.int32))
        expected = self.model.commit(tokens)
        self._expect("commit", info.status, expected)
        for r in range(self.rows):
            if expected[r] == Status.OK:
                self.pending[r] = self.pending[r][counts[r] :]

    def _truncate(self) -> None:
        chosen = self.random.random(self.rows) < 0.5
        length = np.array([self.random.integers(-1, row.length + 2) for row in self.model.rows])
        self.table, info = self.operations["truncate"](
            self.table, jnp.asarray(length, jnp.int32), max_pages=self.MAX_PAGES, rows=jnp.asarray(chosen)
        )
        expected = self.model.truncate(length.tolist(), self.MAX_PAGES, chosen.tolist())
        self._expect("truncate", info.status, expected)
        self._forget_pending()

    def _release(self) -> None:
        chosen = self.random.random(self.rows) < 0.3
        self.table, info = self.operations["release"](self.table, jnp.asarray(chosen), max_pages=self.MAX_PAGES)
        self._expect("release", info.status, self.model.release(chosen.tolist(), self.MAX_PAGES))
        self._forget_pending()

    def _forget_pending(self) -> None:
        for r, row in enumerate(self.model.rows):
            self.pending[r] = self.pending[r][: row.reserved - row.length]

    def _fork(self) -> None:
        parent = self.random.integers(-1, self.rows + 1, self.rows)
        self.table, info = self.operations["fork"](self.table, jnp.asarray(parent, jnp.int32), max_pages=self.MAX_PAGES)
        self._expect("fork", info.status, self.model.fork(parent.tolist(), self.MAX_PAGES))

    def _reorder(self) -> None:
        parent = np.where(
            self.random.random(self.rows) < 0.5,
            np.arange(self.rows),
            self.random.integers(0, self.rows + (self.random.random() < 0.2), self.rows),
        )
        self.table, info = self.operations["reorder"](
            self.table, jnp.asarray(parent, jnp.int32), max_pages=self.MAX_PAGES
        )
        self._expect("reorder", info.status, self.model.reorder(parent.tolist(), self.MAX_PAGES))
        self._forget_pending()

    def _adopt(self) -> None:
        source: list[int | None] = [None] * self.rows
        tokens, spoiled = np.zeros(self.rows, int), np.zeros(self.rows, bool)
        lists = [np.full((self.rows, s.width), s.num_pages) for s in self.shapes]
        donors = [r for r, row in enumerate(self.model.rows) if row.length]
        for r in range(self.rows):
            if donors and self.random.random() < 0.5:
                donor = int(self.random.choice(donors))
                source[r], tokens[r] = donor, self.random.integers(1, self.model.rows[donor].length + 1)
                for g, shape in enumerate(self.shapes):
                    count = -(-tokens[r] // shape.page_size)
                    lists[g][r, :count] = np.asarray(self.table.groups[g].pages[donor, :count])
                if self.random.random() < 0.1:
                    g = self.random.integers(len(self.shapes))
                    unheld = np.flatnonzero(np.asarray(self.table.groups[g].refcount) == 0)
                    lists[g][r, 0] = self.random.choice([-1, self.shapes[g].num_pages, 2**30, *unheld[:1]])
                    spoiled[r] = True
            elif self.random.random() < 0.05:
                tokens[r] = self.random.choice([-1, 2**31 - 1])
        self.table, info = self.operations["adopt"](
            self.table,
            tuple(jnp.asarray(ids, jnp.int32) for ids in lists),
            jnp.asarray(tokens, jnp.int32),
            max_pages=self.MAX_PAGES,
        )
        expected = self.model.adopt(source, tokens.tolist(), self.MAX_PAGES, spoiled.tolist())
        self._expect("adopt", info.status, expected)

    def _pin(self) -> None:
        lists, chosen = [], []
        for g, shape in enumerate(self.shapes):
            ids, expected = [], []
            for _ in range(3):
                holding = [row for row in range(self.rows) if self.model.rows[row].pages[g]]
                if holding and self.random.random() < 0.6:
                    row = int(self.random.choice(holding))
                    index = int(self.random.integers(len(self.model.rows[row].pages[g])))
                    physical = int(self.table.groups[g].pages[row, index])
                    ids.append(physical)
                    expected.append(Status.OK)
                    chosen.append((g, self.model.rows[row].pages[g][index], physical))
                elif self.random.random() < 0.3:
                    unheld = np.flatnonzero(np.asarray(self.table.groups[g].refcount) == 0)
                    ids.append(int(self.random.choice([-1, shape.num_pages + 1, *unheld[:1]])))
                    expected.append(Status.STALE)
                else:
                    ids.append(shape.num_pages)
                    expected.append(Status.OK)
            lists.append((ids, expected))
        self.table, info = self.operations["pin"](self.table, tuple(jnp.asarray(ids, jnp.int32) for ids, _ in lists))
        for status, (_, expected) in zip(info.status, lists, strict=True):
            self._expect("pin", status, expected)
        for g, page, physical in chosen:
            page.pins += 1
            self.pinned.append((g, page, physical))

    def _unpin(self) -> None:
        lists: list[tuple[list[int], list[Status]]] = []
        gone = []
        for g, shape in enumerate(self.shapes):
            mine = [pinned for pinned in self.pinned if pinned[0] == g]
            taken = [mine[i] for i in self.random.permutation(len(mine))[: self.random.integers(0, 3)]]
            ids, expected = [physical for _, _, physical in taken], [Status.OK] * len(taken)
            gone += taken
            pins = np.asarray(self.table.groups[g].pins)
            if self.random.random() < 0.2 and (pins == 0).any():
                ids.append(int(np.flatnonzero(pins == 0)[0]))
                expected.append(Status.STALE)
            while len(ids) < 3:
                ids.append(shape.num_pages)
                expected.append(Status.OK)
            lists.append((ids, expected))
        self.table, info = self.operations["unpin"](self.table, tuple(jnp.asarray(ids, jnp.int32) for ids, _ in lists))
        for status, (_, expected) in zip(info.status, lists, strict=True):
            self._expect("unpin", status, expected)
        for pinned in gone:
            self.pinned.remove(pinned)
            pinned[1].pins -= 1
            self.model._orphan(pinned[0], pinned[1])

    def _advance(self) -> None:
        epoch = len(self.model.dropped) - 1
        completed = epoch if self.random.random() < 0.6 else int(self.random.integers(epoch - 5, epoch + 2))
        self.table, info = self.operations["advance"](self.table, jnp.int32(completed))
        self._expect("advance", [info.status], [self.model.advance(completed)])

    def compare(self) -> None:
        """Invariants, counts, page identity and the content of every committed position."""
        assert pages.check_invariants(self.table) == []
        table = jax.tree.map(np.asarray, self.table)
        for g, (group, shape) in enumerate(zip(table.groups, self.shapes, strict=True)):
            assert (int(group.free), int(group.limbo)) == (self.model.free[g], self.model.limbo[g])
            physical: dict[int, int] = {}
            for r, row in enumerate(self.model.rows):
                assert (table.length[r], table.reserved[r]) == (row.length, row.reserved)
                assert group.end[r] == len(row.pages[g])
                for index, page in enumerate(row.pages[g]):
                    number = int(group.pages[r, index])
                    assert physical.setdefault(id(page), number) == number, "one page has two places"
                    assert group.refcount[number] == page.holders
                for position, token in enumerate(row.tokens):
                    page_id = group.pages[r, position // shape.page_size]
                    assert self.memory[g][page_id, position % shape.page_size] == token, (
                        f"group {g} row {r} position {position} lost its content"
                    )
            assert len(set(physical.values())) == len(physical), "two pages have one place"
            for pinned_group, page, number in self.pinned:
                if pinned_group == g:
                    assert physical.get(id(page), number) == number and group.refcount[number] == page.holders
