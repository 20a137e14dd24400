"""The engine on extents: the reference's tokens, while pages are moved together and rows are refused as fragmented."""

from dataclasses import replace

import numpy as np
import pytest

import kvjax
from kvjax.engine import BeamOptions, BeamSearch, Engine
from kvjax.pages import Status
from tests.engine.serving import (
    PROMPTS,
    assert_expected,
    assert_same_tokens,
    extents,
    greedy,
    make_engine,
    model,
    serve,
)


def spy_on_refusals(monkeypatch) -> list[int]:
    """How many rows each step refused as FRAGMENTED, where it did any."""
    seen, real = [], Engine._make_room

    def look(self, shares, report):
        refused = int((np.asarray(report.status) == Status.FRAGMENTED).sum())
        seen.extend([refused] * bool(refused))
        real(self, shares, report)

    monkeypatch.setattr(Engine, "_make_room", look)
    return seen


def test_rows_that_are_refused_as_fragmented_are_mended(monkeypatch):
    """Lists of two runs, and rows that grow in turn, a page at a time: without moving pages nobody would get on."""
    refusals = spy_on_refusals(monkeypatch)
    engine = make_engine(extents(64, 4, mean_runs=100.0, span=1, max_runs=2), burst=2)
    assert_expected(serve(engine, greedy()), "few runs")
    metrics, cache = engine.metrics(), engine._runner.cache
    assert len(refusals) > 0 < metrics.compactions and metrics.moved_pages > metrics.compactions
    assert cache.transitions.check_invariants(cache.ownership) == []
    assert metrics.mean_runs <= 2


def test_bytes_that_are_not_moved_with_their_pages_are_noticed(monkeypatch):
    real = kvjax.compact

    def only_the_table(cache, moves, **static):
        after, status = real(cache, moves, **static)
        return replace(after, pools=cache.pools), status

    monkeypatch.setattr(kvjax, "compact", only_the_table)
    engine = make_engine(extents(64, 4, mean_runs=1.0, span=1), burst=2)
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_same_tokens(serve(engine, greedy()), "bytes left behind")


def test_where_nothing_can_be_moved_the_newest_gives_way_and_the_last_ends_with_an_error(monkeypatch):
    monkeypatch.setattr("kvjax.engine.extents.plan_compaction", lambda *_, **__: None)
    engine = make_engine(extents(64, 4, span=1, max_runs=1), burst=2)
    results = serve(engine, greedy())
    assert engine.metrics().preemptions > 0 and {one.finish_reason for one in results} <= {"length", "error"}
    assert_same_tokens(results, "no compaction")
    assert all("max_runs is too small" in one.error for one in results if one.error is not None)


def test_beams_share_part_and_are_permuted():
    """The same hypotheses as on pages alone."""
    options = BeamOptions(num_beams=3, max_new_tokens=8, eos=(7,))
    found = []
    for side_by_side in (None, kvjax.extents.ExtentOptions(span=2)):
        beams = BeamSearch(model(), rows=6, num_pages=40, page_size=4, max_context=96, chunk=16, extents=side_by_side)
        found.append([[one.tokens for one in result.hypotheses] for result in beams.run(PROMPTS[:2], options).results])
    assert found[0] == found[1] and all(found[0])
    assert beams.cache.transitions.check_invariants(beams.cache.ownership) == []


def test_swapping_needs_lists_that_hold_any_row():
    with pytest.raises(ValueError, match=r"ExtentOptions\(max_runs=40\)"):
        make_engine(extents(24, 4), preemption="swap", host_bytes=1 << 20)


def test_there_is_nothing_to_compact_on_pages_alone():
    cache = kvjax.init(model().spec, rows=2, num_pages=4, max_context=8)
    with pytest.raises(ValueError, match="extents=ExtentOptions"):
        kvjax.compact(cache, None, max_pages=4)
