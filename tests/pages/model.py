"""A plain Python model of the page table: one row at a time, Python objects for pages, tokens themselves as content.

It follows the contract's words, not the implementation: a page is an object that counts its holders, a row is a list of
pages and a list of tokens, and every operation is a loop.  No array and no page number: where a page lies is the real
table's business, and `harness` checks that the two agree.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvjax.pages import GroupShape, Status


class Page:
    """A page that somebody holds or held; `serial` tells it from every other."""

    serials = itertools.count()

    def __init__(self) -> None:
        self.serial = next(Page.serials)
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

    def __init__(self, shapes: tuple[GroupShape, ...], rows: int, max_epochs: int) -> None:
        self.shapes = shapes
        self.max_epochs = max_epochs
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

    @property
    def epoch(self) -> int:
        return len(self.dropped) - 1

    def pin(self, page: Page) -> None:
        page.pins += 1

    def unpin(self, group: int, page: Page) -> None:
        page.pins -= 1
        self._orphan(group, page)

    def advance(self, completed: int) -> Status:
        valid = self.completed <= completed <= self.epoch and self.epoch - completed < self.max_epochs
        if valid:
            for g in range(len(self.shapes)):
                self.free[g] += sum(e[g] for e in self.dropped[self.completed + 1 : completed + 1])
            self.completed = completed
        self.dropped.append([0] * len(self.shapes))
        return Status.OK if valid else Status.STALE
