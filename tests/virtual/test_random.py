"""Random operations against a model in plain lists: contents, refusals, and what is held, after every one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvjax import Status
from kvjax.virtual import VirtualSpace
from kvjax.virtual.host import HostRange
from kvjax.virtual.ownership import Ownership
from tests.virtual.spaces import CONTEXT, PAGE, ROWS, contents, extend, make_space


class Page:
    """A page-group; its identity is all there is to it."""


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)


@dataclass
class Model:
    """Rows of values, and who shares which page-group.  Memory that finished rows keep counts as free."""

    num_pages: int
    rows: list[Row | None] = field(default_factory=lambda: [None] * ROWS)
    pins: list[tuple[list[int], list[Page]]] = field(default_factory=list)

    def live(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is not None]

    def holders(self, page: Page) -> int:
        lists = [row.pages for row in self.rows if row is not None] + [pages for _, pages in self.pins]
        return sum(page in pages for pages in lists)

    def held(self) -> int:
        lists = [row.pages for row in self.rows if row is not None] + [pages for _, pages in self.pins]
        return len({id(page) for pages in lists for page in pages})

    def append(self, values: dict[int, list[int]]) -> dict[int, Status]:
        """Rows in order; the first that does not fit, and all after it that need memory, are refused."""
        free, stopped, status = self.num_pages - self.held(), False, {}
        for index in sorted(values):
            row, new = self.rows[index], values[index]
            end = len(row.tokens) + len(new)
            tail = len(row.tokens) // PAGE
            copy = tail < len(row.pages) and self.holders(row.pages[tail]) > 1
            fresh = max(-(-end // PAGE) - len(row.pages), 0)
            if end > CONTEXT:
                status[index] = Status.TABLE_FULL
            elif copy + fresh and (stopped or copy + fresh > free):
                stopped, status[index] = True, Status.OUT_OF_PAGES
            else:
                status[index] = Status.OK
                free -= copy + fresh
                if copy:
                    row.pages[tail] = Page()
                row.pages += [Page() for _ in range(fresh)]
                row.tokens += new
        return status

    def share(self, target: int, tokens: list[int], pages: list[Page]) -> None:
        self.rows[target] = Row(list(tokens), pages[: -(-len(tokens) // PAGE)])

    def truncate(self, index: int, length: int) -> None:
        row = self.rows[index]
        row.tokens, row.pages = row.tokens[:length], row.pages[: -(-length // PAGE)]


def walk(space: VirtualSpace, seed: int, steps: int) -> set[str]:
    """Random operations on both; raises AssertionError where they differ.  What was seen."""
    random_, model, seen, pinned, counter = random.Random(seed), Model(len(space._rows.owner.refcount)), set(), [], 0
    for _ in range(steps):
        live = model.live()
        operation = random_.choice(
            ["admit", "append", "append", "append", "alias", "release", "truncate", "pin", "unpin"]
        )
        if operation in ("admit", "alias") and len(live) < ROWS:
            source = random_.choice(live) if live and operation == "alias" else None
            tokens = len(model.rows[source].tokens) if source is not None else 0
            shared = random_.randint(1, tokens) if tokens else 0
            row = space.admit(random_.randint(shared, CONTEXT), shared=shared)
            assert row is not None and model.rows[row] is None
            model.rows[row] = Row()
            if shared:
                assert space.alias(source, row, shared) == Status.OK
                model.share(row, model.rows[source].tokens[:shared], model.rows[source].pages)
                seen.add("alias")
            elif pinned and random_.random() < 0.5:
                which = random_.randrange(len(pinned))
                tokens_of, pages = model.pins[which]
                assert space.adopt(row, pinned[which], len(tokens_of)) == Status.OK
                model.share(row, tokens_of, pages)
                seen.add("adopt")
        elif operation == "append" and live:
            values, tails = {}, set()
            for row in random_.sample(live, random_.randint(1, len(live))):
                state = model.rows[row]
                tail = state.pages[len(state.tokens) // PAGE :][:1]
                # Which of several writers keeps a page-group is the table's own matter, and tested with it.
                if not (tail and id(tail[0]) in tails):
                    tails |= {id(page) for page in tail}
                    values[row] = [counter + index for index in range(random_.choice([1, 1, 2, 5, 11, 30]))]
                    counter += 31
            status = extend(space, values)
            expected = model.append(values)
            assert {row: Status(status[row]) for row in values} == expected
            seen |= {expected[row].name for row in values}
        elif operation == "release" and live:
            row = random_.choice(live)
            space.release(row)
            model.rows[row] = None
            if random_.random() < 0.3:
                space.reclaim(random_.randint(1, model.num_pages))
                seen.add("reclaim")
        elif operation == "truncate" and live:
            row = random_.choice(live)
            length = random_.randint(0, len(model.rows[row].tokens))
            if length:
                space.truncate(row, length)
                model.truncate(row, length)
                seen.add("truncate")
        elif operation == "pin" and live and len(pinned) < 2:
            row = random_.choice(live)
            length = len(model.rows[row].tokens)
            if length:
                pinned.append(space.pin(row, length))
                model.pins.append((list(model.rows[row].tokens), model.rows[row].pages[: -(-length // PAGE)]))
                seen.add("pin")
        elif operation == "unpin" and pinned:
            space.unpin(pinned.pop())
            model.pins.pop()
        space.settle()
        assert space.check() == []
        for row in model.live():
            tokens = model.rows[row].tokens
            assert contents(space, row, len(tokens)) == tokens, f"row {row} after {operation}"
        figures = space.figures()
        assert figures.held_bytes >= model.held() * space.layout.page_bytes
        assert figures.useful_bytes == sum(len(model.rows[row].tokens) for row in model.live()) * 512
    return seen


def test_random_operations_agree_with_the_model():
    seen = set()
    for seed in range(4):
        space = make_space()
        seen |= walk(space, seed, 100)
        counters = space.figures().counters
        seen |= {name for name in ("copies", "reclaimed_rows", "reused_pages") if getattr(counters, name)}
        space.close()
    everything = {"alias", "adopt", "OK", "OUT_OF_PAGES", "TABLE_FULL", "reclaim", "truncate", "pin"}
    assert seen == everything | {"copies", "reclaimed_rows", "reused_pages"}


def test_random_operations_with_everything_done_ahead():
    """The background thread maps ahead, keeps page-groups free and one row mapped; contents are the same."""
    space = make_space(lookahead=9, watermark=2, eager_tokens=8, num_pages=64)
    walk(space, 0, 40)
    assert space.figures().counters.ahead_calls
    space.close()


def _unmap_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings go with the row that made them, although others hold the page-groups, and it is said to be parked."""
    release = VirtualSpace.release

    def too_early(self: VirtualSpace, row: int) -> None:
        release(self, row)
        self._rows.mapping.clear(self._rows.place(row), self.layout.span_pages)

    monkeypatch.setattr(VirtualSpace, "release", too_early)


def _reclaim_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reclaims the coldest row and one that is in use."""
    reclaim = VirtualSpace.reclaim

    def too_much(self: VirtualSpace, pages: int) -> int:
        for row in np.flatnonzero(self._rows.occupied)[:1].tolist():
            self._rows.mapping.clear(self._rows.place(row), 1)
        return reclaim(self, pages)

    monkeypatch.setattr(VirtualSpace, "reclaim", too_much)


def _share_without_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on write that copies nothing."""
    monkeypatch.setattr(HostRange, "copy", lambda self, source, target: self._commit(target, 1))


def _alias_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are found one page-group off."""
    pages_of = Ownership.pages_of
    monkeypatch.setattr(Ownership, "pages_of", lambda self, row: np.roll(pages_of(self, row), 1))


@pytest.mark.parametrize("twin", [_unmap_released, _reclaim_what_is_used, _share_without_copy, _alias_the_next_page])
def test_broken_twins_are_caught(twin, monkeypatch):
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(6):
            walk(make_space(), seed, 100)
