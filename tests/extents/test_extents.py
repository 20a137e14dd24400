"""Extents keep the page table's contract in random order; and what they add, case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import extents as E
from kvjax.extents import free
from kvjax.pages import Status
from tests.extents.twins import TWINS
from tests.extents.walk import ExtentWalk, compiled


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("setting", ["two groups", "few runs"])
def test_random_transitions_match_the_page_tables_model(setting, seen):
    walk = ExtentWalk(setting, seed=0)
    for _ in range(200):
        walk.step()
    seen.update(walk.harness.counts)


def test_every_status_was_seen(seen):
    expected = ("reserve:FRAGMENTED", "reserve:OUT_OF_PAGES", "reserve:PAGES_PENDING", "adopt:STALE", "compact:OK")
    assert all(seen[name] for name in expected) and seen["copies"] > 20, seen


@pytest.mark.parametrize("twin", TWINS[1::6], ids=lambda twin: twin.broken.__name__.replace("_", " "))
def test_a_broken_twin_is_caught(twin):
    assert twin.caught()


class Table:
    """An extent table of one group, pages of 2 tokens, and calls on it that must succeed unless told otherwise."""

    def __init__(self, num_pages: int, *, rows: int = 4, max_runs: int = 8, span: int = 4) -> None:
        self.now = E.make_extent_table([E.ExtentShape(num_pages, 2, 32, max_runs=max_runs, span=span)], rows=rows)

    def __call__(self, name: str, *arguments, want: Status = Status.OK, **static):
        self.now, info = compiled()[name](self.now, *arguments, **static)
        status = np.asarray(info.status if name not in ("pin", "unpin") else info.status[0])
        assert (status.max() if want else status.sum()) == want, status
        assert E.check_invariants(self.now) == []
        return info

    def grow(self, *tokens: int, want: Status = Status.OK, commit: bool = True):
        info = self("reserve", jnp.array(tokens), max_tokens=64, want=want)
        if commit:
            self("commit", info.tokens)
        return info

    def pages(self, row: int) -> list[int]:
        group = self.now.table.groups[0]
        return group.pages[row, : int(group.end[row])].tolist()

    def runs(self, row: int) -> list[tuple[int, int]]:
        runs = self.now.extents[0].runs
        number = int(runs.num_runs[row])
        return list(zip(runs.starts[row, :number].tolist(), runs.counts[row, :number].tolist(), strict=True))


def test_rows_that_grow_in_turn_stay_in_whole_spans():
    """64 rows, a page each in turn: no run but the last of a row is shorter than a span."""
    table = E.make_extent_table([E.ExtentShape(64 * 24, 1, 24, max_runs=8, span=8)], rows=64)
    for _ in range(24):
        table, info = compiled()["reserve"](table, jnp.ones(64, jnp.int32), max_tokens=64)
        table, _ = compiled()["commit"](table, info.tokens)
    assert E.check_invariants(table) == []
    counts = np.asarray(table.extents[0].runs.counts)
    assert counts.sum() == 64 * 24 and counts[counts > 0].min() >= 8


def test_of_two_rows_that_would_go_on_in_one_page_the_lower_gets_it():
    table = Table(32)
    table.grow(4, 0, 0, 0)
    table("fork", jnp.array([-1, 0, 0, -1]), max_pages=8)
    table.grow(2, 2, 2, 0)
    assert table.runs(0) == [(0, 3)] and len(table.runs(1)) == len(table.runs(2)) == 2


def test_a_shared_tail_before_reserved_pages_splits_the_run():
    """Row 0 has reserved past its tail when row 1 adopts it: its copy lies in the middle of its pages."""
    table = Table(32)
    table.grow(3, 0, 0, 0)
    table.grow(5, 0, 0, 0, commit=False)
    assert table.runs(0) == [(0, 4)]
    prefix = jnp.full((4, 4), 32).at[1, :2].set(jnp.array(table.pages(0)[:2]))
    table("adopt", (prefix,), jnp.array([0, 3, 0, 0]), max_pages=8)
    info = table.grow(5, 0, 0, 0)
    copy = int(info.copies[0].target[0])
    assert table.runs(0) == [(0, 1), (copy, 1), (2, 2)] and table.runs(1) == [(0, 2)]


def test_a_prefix_in_too_many_runs_is_refused():
    table = Table(32, max_runs=2)
    table.grow(8, 8, 0, 0)
    prefix = jnp.full((4, 4), 32).at[2].set(jnp.array([0, 4, 1, 5]))
    table("adopt", (prefix,), jnp.array([0, 0, 8, 0]), max_pages=8, want=Status.FRAGMENTED)
    assert table.pages(2) == []
    table("adopt", (prefix,), jnp.array([0, 0, 4, 0]), max_pages=8)
    assert table.runs(2) == [(0, 1), (4, 1)]


def test_advance_counts_many_freed_pages_in_parts(monkeypatch):
    """Pages past the last whole span are counted too; a call that frees nothing changes no span."""
    monkeypatch.setattr(free, "_NOTED_AT_ONCE", 3)
    table = Table(18)
    table.grow(36, 0, 0, 0)
    table("release", jnp.array([True, False, False, False]), max_pages=18)
    for _ in range(2):
        table.now, info = E.advance(table.now, table.now.table.epoch)
        assert info.status == Status.OK and E.check_invariants(table.now) == []
        assert (int(table.now.table.groups[0].free), int(table.now.extents[0].free_spans)) == (18, 4)


def scattered() -> tuple[Table, E.Moves]:
    """Rows 0, 2 and 3 in four runs of a page each, row 1 sharing those of row 0; a plan that mends two of the rows."""
    table = Table(32, span=1)
    for _ in range(4):
        table.grow(2, 0, 2, 2)
    table("fork", jnp.array([-1, 0, -1, -1]), max_pages=8)
    assert len(table.runs(0)) == 4
    limits = E.CompactionLimits(moves=8, entries=16, pages=16)
    return table, E.plan_compaction(table.now, limits, most_runs=2)


def test_a_compaction_moves_a_shared_page_once_for_all_its_rows_and_leaves_the_old_one_to_its_fence():
    table, moves = scattered()
    before, free = table.pages(0), int(table.now.table.groups[0].free)
    info = table("compact", moves, max_pages=16)
    assert len(table.runs(0)) == 1 and table.pages(0) == table.pages(1)
    group = table.now.table.groups[0]
    source, target = (ids[ids < 32].tolist() for ids in map(np.asarray, (info.copies.source, info.copies.target)))
    assert (int(group.free), int(group.limbo)) == (free - len(source), len(source))
    assert source[:4] == before and target[:4] == table.pages(0)


SPOILED = {
    "a target in use": lambda moves: replace(moves, target=np.where(np.arange(8) == 0, moves.source, moves.target)),
    "a target twice": lambda moves: replace(moves, target=np.where(np.arange(8) == 0, moves.target[1], moves.target)),
    "a holder left out": lambda moves: replace(moves, row=np.where(np.arange(16) == 7, 4, moves.row)),
    "a row named twice": lambda moves: replace(moves, row=np.where(np.arange(16) < 8, 0, moves.row)),
    "another page": lambda moves: replace(moves, logical=np.where(np.arange(16) < 8, 0, moves.logical)),
    "no order": lambda moves: replace(moves, **{n: getattr(moves, n)[::-1] for n in ("row", "logical", "move")}),
}


@pytest.mark.parametrize("how", SPOILED)
def test_moves_that_do_not_fit_the_table_change_nothing(how):
    table, moves = scattered()
    before = jax.tree.map(np.asarray, table.now)
    info = table("compact", SPOILED[how](moves), max_pages=16, want=Status.STALE)
    assert (np.asarray(info.copies.source) == 32).all()
    for old, new in ((before.table, table.now.table), (before.extents[0].runs, table.now.extents[0].runs)):
        jax.tree.map(np.testing.assert_array_equal, old, new)


def test_a_pinned_page_is_not_moved():
    table, moves = scattered()
    table("pin", (jnp.array(table.pages(0)[:1]),))
    table("compact", moves, max_pages=16, want=Status.STALE)
    limits = E.CompactionLimits(moves=8, entries=16, pages=16)
    planned = E.plan_compaction(table.now, limits, most_runs=2)
    assert table.pages(0)[0] not in planned.source.tolist()
    table("compact", planned, max_pages=16)
    assert len(table.runs(0)) == 2


def test_a_compaction_over_its_bound_changes_nothing():
    table, moves = scattered()
    table("compact", moves, max_pages=7, want=Status.OVER_BOUND)
    assert len(table.runs(0)) == 4


def test_a_span_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="span=9 exceeds num_pages=8"):
        E.ExtentShape(8, 1, 8, max_runs=2, span=9)
