"""Preemption by swap: pages go to the host and come back, fenced by pins, and no token changes."""

from collections import Counter

import numpy as np
import pytest

import kvjax
from kvjax.engine import PromptLookup, Request, swap_steps
from kvjax.engine.sequence import pages_for
from kvjax.engine.swap import Saved
from kvjax.pages import PageTableError, check_invariants
from tests.engine.serving import (
    PREFIX,
    PROMPTS,
    assert_expected,
    assert_same_tokens,
    contiguous,
    greedy,
    make_engine,
    paged,
    serve,
)

PAGE_BYTES = 16 * 256
"""Of a page of 16 tokens of the tiny model."""


def tight(num_pages=9, page_size=16, *, host_bytes=1 << 30, **settings):
    """An engine with too few pages."""
    return make_engine(paged(num_pages, page_size), burst=2, preemption="swap", host_bytes=host_bytes, **settings)


def table(engine):
    return engine._runner.cache.table


def assert_left_clean(engine, num_pages):
    assert engine._runner.free == num_pages and engine._swap.held == []
    assert not np.asarray(table(engine).groups[0].pins).any() and check_invariants(table(engine)) == []


def test_swapped_requests_get_the_same_tokens_and_compute_nothing_twice():
    engine = tight()
    results = serve(engine, greedy())
    assert_expected(results, "swapped")
    metrics = engine.metrics()
    assert metrics.preemptions == metrics.resumed_by_swap > 0 == metrics.resumed_by_recompute == metrics.swaps_refused
    assert metrics.computed_tokens == sum(len(prompt) + 23 for prompt in PROMPTS)
    assert metrics.swapped_bytes == metrics.swapped_pages * PAGE_BYTES > 0
    assert_left_clean(engine, 9)


def test_drafting_and_swapping_change_no_token():
    engine = tight(drafter=PromptLookup(tokens=2, seen=64))
    assert_expected(serve(engine, greedy()), "drafting and swapping")
    metrics = engine.metrics()
    assert metrics.resumed_by_swap > 0 < metrics.accepted_tokens
    assert_left_clean(engine, 9)


def test_a_host_that_is_full_means_recomputing():
    engine = tight(host_bytes=8 * PAGE_BYTES - 1)  # saves are padded to eight pages
    assert_expected(serve(engine, greedy()), "no room on the host")
    metrics = engine.metrics()
    assert metrics.swaps_refused == metrics.preemptions == metrics.resumed_by_recompute > 0 == metrics.swapped_pages
    engine = tight(host_bytes=8 * PAGE_BYTES, max_seqs=6)
    assert_expected(serve(engine, greedy()), "room for one")
    assert engine.metrics().resumed_by_swap > 0
    assert_left_clean(engine, 9)


def reach_the_first_save(engine):
    """Steps until somebody's pages are on their way to the host; returns what was saved."""
    while not engine._swap.held:
        engine.step()
    (saved,) = engine._swap.held
    return saved


def reusable(engine):
    """Pages that the next reserve may take, now or after an advance."""
    group = table(engine).groups[0]
    number = int(group.free) + int(group.limbo)
    return set(group.ring[(int(group.head) + np.arange(number)) % group.num_pages].tolist())


def test_saved_pages_are_not_reusable_before_their_copy_has_arrived(monkeypatch):
    monkeypatch.setattr(Saved, "arrived", property(lambda saved: False))
    engine = tight()
    for request in greedy():
        engine.submit(request)
    saved = reach_the_first_save(engine)
    (victim,) = (one for one in engine._scheduler.waiting if one.saved is saved)
    assert victim.row == -1 and saved.number == len(pages := np.asarray(saved.pinned[0])[: saved.number])
    engine._swap.collect()
    assert (np.asarray(table(engine).groups[0].pins)[pages] == 1).all()
    assert not reusable(engine) & set(pages.tolist()) and check_invariants(table(engine)) == []
    monkeypatch.undo()
    engine._swap.collect(wait=True)
    assert saved.pinned is None and set(pages.tolist()) <= reusable(engine)
    assert_expected(engine.run(), "a slow copy")


def test_a_save_that_does_not_pin_is_noticed(monkeypatch):
    monkeypatch.setattr(kvjax, "pin", lambda cache, ids: (cache, None))
    engine = tight()
    for request in greedy():
        engine.submit(request)
    saved = reach_the_first_save(engine)
    assert reusable(engine) & set(np.asarray(saved.pinned[0])[: saved.number].tolist())
    with pytest.raises(PageTableError, match="unpinning saved pages"):
        engine.run()


def test_bytes_that_come_back_in_the_wrong_order_are_noticed(monkeypatch):
    write_pages = swap_steps.write_pages
    monkeypatch.setattr(
        swap_steps, "write_pages", lambda pool, number, pages, images: write_pages(pool, number, pages, images[:, ::-1])
    )
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_expected(serve(tight(), greedy()), "pages in the wrong order")


def sampled(prompt, seed=3):
    return Request(prompt, max_new_tokens=24, temperature=1.0, top_k=20, seed=seed)


def test_what_samples_share_is_saved_once_and_shared_again():
    engine = make_engine(paged(14, 16), burst=2, preemption="swap", host_bytes=1 << 30)
    engine.submit(Request(PROMPTS[5], max_new_tokens=92))
    engine.submit_samples(sampled(PROMPTS[3]), 3)
    saved = reach_the_first_save(engine)
    # Three whole pages in common, and the fourth (or fifth) of each: computed tokens say which.
    own = [-(-tokens // 16) - 3 for tokens in saved.computed.values()]
    assert saved.shared == 3 and len(own) == 3 and saved.number == 3 + sum(own)
    refcounts = set()
    while not engine.idle:
        engine.step()
        assert check_invariants(table(engine)) == []
        refcounts.add(Counter(np.asarray(table(engine).groups[0].refcount).tolist())[3])
    results = [engine.results[number] for number in range(4)]
    assert_same_tokens(results[:1], "beside samples")
    roomy = make_engine(paged(64, 16), burst=2)
    roomy.submit_samples(sampled(PROMPTS[3]), 3)
    assert [one.tokens for one in results[1:]] == [one.tokens for one in roomy.run()]
    assert 3 in refcounts and engine.metrics().resumed_by_swap >= 3
    # Nothing was computed twice.
    assert engine.metrics().computed_tokens == (68 + 91) + 53 + 3 * 24
    assert_left_clean(engine, 14)


@pytest.mark.parametrize("cancelled", [1, 3])
def test_cancelling_while_swapped_leaves_nothing_behind(cancelled):
    engine = make_engine(paged(14, 16), burst=2, preemption="swap", host_bytes=1 << 30)
    engine.submit(Request(PROMPTS[5], max_new_tokens=92))
    ids = engine.submit_samples(sampled(PROMPTS[3]), 3)
    saved = reach_the_first_save(engine)
    for number in ids[:cancelled]:
        engine.cancel(number)
    engine._serve_cancellations()
    assert set(saved.computed) == set(ids[cancelled:]) and saved.pinned is not None
    results = engine.run()
    assert_same_tokens(results[:1], "beside cancelled samples")
    assert [one.finish_reason for one in results[1:]] == ["cancelled"] * cancelled + ["length"] * (3 - cancelled)
    assert engine.metrics().resumed_by_swap >= 3 - cancelled
    assert_left_clean(engine, 14)


@pytest.mark.parametrize(("preemption", "seed"), [("recompute", 0), ("swap", 0), ("swap", 1)])
def test_days_of_requests_samples_and_cancellations_at_random(preemption, seed):
    """Every schedule gives every request the tokens it has alone, and every step leaves a sound table."""
    draw = np.random.default_rng(seed)
    num_pages, page_size = ((6, 16), (20, 4))[seed]
    host_bytes = (8, 1000)[seed] * page_size * 256
    engine = make_engine(
        paged(num_pages, page_size),
        max_seqs=4,
        burst=2,
        preemption=preemption,
        host_bytes=host_bytes if preemption == "swap" else None,
    )
    engine.add_prefix(PREFIX)
    live: set[int] = set()
    for _ in range(90):
        if len(live) < 9 and draw.random() < 0.5:
            request = Request(PROMPTS[draw.choice([0, 2, 4])], max_new_tokens=int(draw.integers(8, 25)))
            live |= set(engine.submit_samples(request, int(draw.integers(1, 4))))
        if live and draw.random() < 0.08:
            engine.cancel(int(draw.choice(sorted(live))))
        live -= {event.id for event in engine.step() if event.result is not None}
        assert check_invariants(table(engine)) == []
    results = engine.run()
    assert_same_tokens(results, f"{preemption}, {seed}")
    assert all(len(one.tokens) == one.request.max_new_tokens for one in results if one.finish_reason == "length")
    metrics = engine.metrics()
    assert set(metrics.finished) == {"length", "cancelled"} and metrics.preemptions >= 3
    assert (metrics.resumed_by_swap > 0) == (preemption == "swap")
    resident = sum(pages_for(holder.computed, page_size) for holder in engine._scheduler.prefixes.resident.values())
    assert engine._runner.free == num_pages - resident and not np.asarray(table(engine).groups[0].pins).any()


def test_bad_settings_of_swapping_say_what_to_do():
    for settings, message in (
        ({"preemption": "drop"}, "preemption='drop' must be 'recompute' or 'swap'"),
        ({"preemption": "swap"}, "needs host_bytes"),
        ({"preemption": "swap", "host_bytes": 0}, "host_bytes=0 must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(paged(9, 16), **settings)
    with pytest.raises(ValueError, match="this cache has none"):
        make_engine(contiguous(4), preemption="swap", host_bytes=1)
