"""The engine on virtual memory gives the reference's tokens, whatever is shared, taken away, drafted or refused."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.engine import PageMap, PromptLookup, Request, VirtualBacking
from kvjax.virtual.host import HostRange
from tests.engine.serving import (
    CONTEXT,
    PREFIX,
    PROMPTS,
    assert_expected,
    assert_same_tokens,
    greedy,
    make_engine,
    model,
    paged,
    serve,
)

PAGE = 16
"""Tokens of the tiny model in 4 KiB."""


def virtual(num_pages, *, lookahead=8, max_context=CONTEXT):
    return VirtualBacking(model().spec, num_pages, max_context, page_group_bytes=4096, lookahead=lookahead)


def sharing(backing, **settings):
    engine = make_engine(backing, burst=2, **settings)
    engine.add_prefix(PREFIX)
    return engine


def test_the_reservation_is_neither_copied_nor_committed():
    engine = make_engine(virtual(64, max_context=1 << 20), burst=8)
    assert_expected(serve(engine, greedy()), "virtual")
    space = engine._runner.cache
    figures = space.figures()
    assert space.check() == [] and space.layout.page_tokens == PAGE
    assert figures.reserved_bytes >= 4 * (256 << 20) and figures.resident_bytes <= 64 * 4096
    for compiled in engine._runner.executables._executables.values():
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
        assert compiled.memory_analysis().output_size_in_bytes < 1 << 16


def test_a_tight_pool_with_a_shared_prefix_is_served_as_pages_are():
    engines = [sharing(backing) for backing in (virtual(9, lookahead=0), paged(9, PAGE))]
    for engine in engines:
        assert_expected(serve(engine, greedy()), "tight")
    one, other = (engine.metrics() for engine in engines)
    assert one.preemptions > 0 and one.copies_on_write > 0
    for figure in ("preemptions", "copies_on_write", "peak_pages", "computed_tokens"):
        assert getattr(one, figure) == getattr(other, figure), figure
    assert engines[0]._runner.cache.check() == []


def test_a_burst_for_which_memory_lacks_goes_as_far_as_it_can():
    """Were it not so, rows that may each take one more token would wait for a whole burst's, and give way for it."""
    engine = make_engine(virtual(9, lookahead=0), burst=8)
    engine.add_prefix(PREFIX)
    assert_expected(serve(engine, greedy()), "bursts that do not fit")
    assert engine._runner.cache.figures().counters.refusals > 0
    assert engine.metrics().preemptions == 0


def test_samples_and_drafts():
    def sampled(backing, **settings):
        engine = make_engine(backing, **settings)
        request = Request(PROMPTS[1], max_new_tokens=12, temperature=1.0, top_k=20, seed=3)
        engine.submit_samples(request, 3)
        engine.submit(Request(PROMPTS[5], max_new_tokens=12))
        return [result.tokens for result in engine.run()], engine

    tokens, engine = sampled(virtual(40), drafter=PromptLookup(tokens=3))
    assert tokens == sampled(paged(40, PAGE))[0] and len(set(tokens)) == 4
    metrics = engine.metrics()
    assert metrics.drafted_tokens > metrics.accepted_tokens > 0 and metrics.copies_on_write > 0
    assert engine._runner.cache.check() == []


def test_joining_and_cancelling_at_random_while_memory_is_mapped_ahead():
    engine = sharing(virtual(9))
    draw = np.random.default_rng(5)
    live = set()
    for step in range(80):
        if draw.random() < (0.5 if step % 40 < 25 else 0.05):
            prompt = PROMPTS[draw.integers(len(PROMPTS))][21 * draw.integers(2) :]
            live.add(engine.submit(Request(prompt, max_new_tokens=int(draw.integers(1, 24)))))
        if live and draw.random() < 0.05:
            engine.cancel(int(draw.choice(sorted(live))))
        live -= {event.id for event in engine.step() if event.result is not None}
    results = engine.run()
    finished = engine.metrics().finished
    assert len(results) > 20 and finished["cancelled"] > 0 and set(finished) == {"length", "cancelled"}
    assert engine.metrics().preemptions > 1
    assert_same_tokens(results, "a long day")
    assert engine._runner.cache.check() == []


def test_a_page_group_that_is_not_copied_on_write_is_noticed(monkeypatch):
    monkeypatch.setattr(HostRange, "copy", lambda self, source, target: self._commit(target, 1))
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_expected(serve(sharing(virtual(9, lookahead=0)), greedy()), "no copies")


def test_what_cannot_work_is_refused_by_name():
    backing = virtual(9)
    with pytest.raises(ValueError, match="this cache has none"):
        make_engine(backing, preemption="swap", host_bytes=1 << 20)
    with pytest.raises(ValueError, match="this one has none"):
        make_engine(backing, page_map=PageMap())
    other = kvjax.CacheSpec.join({"target": model().spec, "draft": model().spec})
    with pytest.raises(NotImplementedError, match="a draft model needs PagedBacking"):
        make_engine(dataclasses.replace(backing, spec=other))
