"""Figures of a run that are known beforehand, and the picture of its pages."""

import math
from itertools import count

import numpy as np
import pytest

from kvjax.engine import PageMap, Request
from kvjax.engine.metrics import Distribution, Recorder
from kvjax.engine.pagemap import FREE
from tests.engine.serving import PREFIX, PROMPTS, greedy, make_engine, paged, serve


def test_times_are_what_the_clock_said():
    recorder = Recorder(num_pages=10, page_size=4, bytes_per_token=100)
    recorder.submitted(0, 5, now=1.0)
    recorder.submitted(1, 3, now=2.0)
    recorder.generated(0, 1, now=3.0)
    recorder.stepped(mapped_pages=3, unshared_pages=6, useful_tokens=9, now=3.0)
    recorder.generated(0, 4, now=5.0)
    recorder.generated(1, 1, now=5.0)
    recorder.finished("stop")
    recorder.stepped(mapped_pages=5, unshared_pages=4, useful_tokens=15, now=5.0)
    recorder.finished("length")
    metrics = recorder.summary(compile_seconds=7.0)
    assert metrics.ttft_seconds == Distribution(2.5, 2.5, 2.99)
    assert metrics.tpot_seconds == Distribution(0.5, 0.5, 0.5)  # four tokens in two seconds; the other has one token
    assert (metrics.seconds, metrics.compile_seconds, metrics.tokens_per_second) == (4.0, 7.0, 1.5)
    assert (metrics.generated_tokens, metrics.finished) == (6, {"stop": 1, "length": 1})
    assert metrics.peak_pages_unshared == 6
    assert (metrics.peak_pages, metrics.kv_bytes_used, metrics.kv_bytes_reserved) == (5, 1500, 2000)
    assert (metrics.kv_bytes_pool, metrics.fragmentation) == (4000, 1 - 24 / 32)


def test_nothing_served_is_no_division_by_zero():
    metrics = Recorder(num_pages=1, page_size=1, bytes_per_token=1).summary(compile_seconds=0.0)
    assert math.isnan(metrics.tokens_per_second) and math.isnan(metrics.ttft_seconds.p99)
    assert metrics.fragmentation == 0
    assert metrics.to_json()["ttft_seconds"] == {"mean": None, "p50": None, "p99": None}


def test_figures_of_a_run():
    engine = make_engine(paged(64, 16), burst=16)
    engine.add_prefix(PREFIX)
    serve(engine, greedy(PROMPTS[:3], 20))
    metrics = engine.metrics()
    assert metrics.prompt_tokens == 26 + 41 + 22 and metrics.generated_tokens == 60
    assert metrics.computed_tokens == 21 + 5 + 20 + 1 + 3 * 19
    assert metrics.copies_on_write == 3  # the prefix's half-full page, once for each
    assert metrics.preemptions == metrics.prefixes_dropped == 0
    # Two pages of the prefix, of which one is shared by all; 45, 60 and 41 tokens computed by each.
    assert metrics.peak_pages == 2 + (3 - 1) + (4 - 1) + (3 - 1)
    assert metrics.kv_bytes_used == (21 + (45 - 16) + (60 - 16) + (41 - 16)) * 256
    assert metrics.kv_bytes_pool == 64 * 16 * 256


def test_compilation_is_kept_out_of_times():
    ticks = count()
    engine = make_engine(paged(64, 16), burst=16, clock=lambda: float(next(ticks)))
    serve(engine, greedy(PROMPTS[:1], 4))
    metrics = engine.metrics()
    assert metrics.compile_seconds == 3  # a tick for each of a mixed step, a burst and a release
    assert metrics.seconds + metrics.compile_seconds < next(ticks)


@pytest.fixture(scope="module")
def page_map():
    page_map = PageMap()
    engine = make_engine(paged(9, 16), burst=2, page_map=page_map)
    engine.add_prefix(PREFIX)
    for request in greedy(PROMPTS[:3]):
        engine.submit(request)
    engine.run()
    return page_map


def test_snapshots_say_who_owns_what(page_map):
    assert page_map.owners == ["prefix 0", "request 0", "request 1", "request 2"]
    first, last = page_map.snapshots[0], page_map.snapshots[-1]
    assert (first.owner == 0).sum() == 1 and (first.owner == FREE).sum() == 8  # a chunk of 16 tokens
    assert not first.shared.any()
    assert any(snapshot.shared.any() for snapshot in page_map.snapshots)
    assert all((snapshot.owner[snapshot.shared] == 0).all() for snapshot in page_map.snapshots)
    assert (last.owner == 0).sum() == 2
    times = [snapshot.seconds for snapshot in page_map.snapshots]
    assert times == sorted(times)


def test_the_picture_has_a_colour_for_every_owner(page_map, tmp_path):
    from matplotlib.image import imread

    page_map.draw(tmp_path / "new folder" / "pages.png")
    image = imread(tmp_path / "new folder" / "pages.png")
    assert image.shape[0] > 400 and image.shape[1] > 800
    assert len(np.unique(image.reshape(-1, 4), axis=0)) > len(page_map.owners)


def test_an_empty_map_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="no step was recorded"):
        PageMap().draw(tmp_path / "pages.png")


def test_a_picture_without_matplotlib_says_what_to_install(page_map, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match=r"kvjax\[plots\]"):
        page_map.draw(tmp_path / "pages.png")


def test_a_request_that_never_got_a_token_has_no_time_to_first_token():
    engine = make_engine(paged(64, 16), burst=16)
    engine.submit(Request((1,)))
    engine.cancel(0)
    engine.run()
    assert math.isnan(engine.metrics().ttft_seconds.mean) and engine.metrics().finished == {"cancelled": 1}
