"""Parallel samples: the tokens of as many requests with these seeds, at the price of one prompt."""

from functools import cache

import pytest

from kvjax.engine import Request
from kvjax.pages import check_invariants
from tests.engine.serving import PREFIX, PROMPTS, contiguous, make_engine, paged, serve

PROMPT = PROMPTS[3]  # 54 tokens
SAMPLED = {"max_new_tokens": 24, "temperature": 1.0, "top_k": 20, "top_p": 0.95}


def request(prompt=PROMPT, seed=7, **changes):
    return Request(prompt, seed=seed, **(SAMPLED | changes))


def tokens_of(results):
    return [result.tokens for result in results]


@cache
def independent(prompt=PROMPT, number=4, seed=7):
    """Tokens of `number` requests, each on its own in a roomy engine."""
    return tokens_of(serve(make_engine(paged(64, 16), burst=16), [request(prompt, seed + i) for i in range(number)]))


def sound(engine):
    return check_invariants(engine._runner.cache.table) == []


@pytest.mark.parametrize("backing", [paged(64, 16), contiguous(4)], ids=["paged", "contiguous"])
def test_samples_are_requests_with_consecutive_seeds(backing):
    engine = make_engine(backing, burst=16)
    assert engine.submit_samples(request(), 4) == (0, 1, 2, 3)
    results = engine.run()
    assert [result.request.seed for result in results] == [7, 8, 9, 10]
    assert tokens_of(results) == independent() and len(set(tokens_of(results))) == 4


def test_the_prompt_is_computed_once_and_its_pages_are_shared():
    engine = make_engine(paged(64, 16), burst=16)
    engine.submit_samples(request(), 4)
    engine.run()
    metrics = engine.metrics()
    # 53 tokens once; then each computes the prompt's last token and 23 of its own.
    assert metrics.computed_tokens == 53 + 4 * 24
    # Three whole pages are shared; the fourth is copied for three of the four. 77 tokens are five pages.
    assert metrics.copies_on_write == 3
    assert (metrics.peak_pages, metrics.peak_pages_unshared) == (3 + 4 * 2, 4 * 5)
    assert metrics.kv_bytes_used == (48 + 4 * (77 - 48)) * 256
    assert engine._runner.free == 64 and sound(engine)


def test_samples_begin_with_a_registered_prefix():
    engine = make_engine(paged(64, 16), burst=16)
    engine.add_prefix(PREFIX)
    engine.submit_samples(request(), 3)
    engine.submit(request(PROMPTS[0]))
    results = engine.run()
    assert tokens_of(results) == independent(number=3) + independent(PROMPTS[0], 1)
    # The prefix once, the rest of the samples' prompt once.
    assert engine.metrics().computed_tokens == 21 + (53 - 21) + 3 * 24 + (5 + 23)
    assert engine._runner.free == 62 and sound(engine)


def test_greedy_samples_are_all_the_same_and_a_prompt_of_one_token_is_not_shared():
    engine = make_engine(paged(64, 16), burst=16)
    engine.submit_samples(Request((5,), max_new_tokens=6), 3)
    assert len(set(tokens_of(engine.run()))) == 1 and engine.metrics().computed_tokens == 3 * 6


def test_events_name_each_sample():
    engine = make_engine(paged(64, 16), burst=16)
    ids = engine.submit_samples(request(), 3)
    told = dict.fromkeys(ids, ())

    def listen(event):
        told[event.id] += event.tokens

    assert tokens_of(engine.run(listen)) == list(told.values())


@pytest.mark.parametrize("when", ["before the first step", "while the prompt is computed", "later"])
def test_cancelling_samples_leaves_the_others_and_no_page_behind(when):
    engine = make_engine(paged(64, 16), burst=4)
    ids = engine.submit_samples(request(), 4)
    for _ in range({"before the first step": 0, "while the prompt is computed": 2}.get(when, 6)):
        engine.step()
    for number in ids[1:] if when == "later" else ids[:3]:
        engine.cancel(number)
    results = engine.run()
    left = 0 if when == "later" else 3
    assert [one.finish_reason for one in results].count("cancelled") == 3
    assert results[left].tokens == independent()[left]
    assert engine._runner.free == 64 and sound(engine)


def test_cancelling_all_samples_while_their_prompt_is_computed_frees_it():
    engine = make_engine(paged(64, 16))
    ids = engine.submit_samples(request(), 4)
    engine.step()
    assert engine._runner.free == 63
    for number in ids:
        engine.cancel(number)
    engine.run()
    assert engine._runner.free == 64 and sound(engine)


@pytest.mark.parametrize("num_pages, page_size, prefix", [(9, 16, True), (30, 4, False)])
def test_groups_that_give_way_to_each_other_get_the_same_tokens(num_pages, page_size, prefix):
    engine = make_engine(paged(num_pages, page_size), max_seqs=4, burst=3)
    if prefix:
        engine.add_prefix(PREFIX)
    engine.submit(request(PROMPTS[0]))
    for index in (1, 2, 0):
        engine.submit_samples(request(PROMPTS[index]), 2 if index else 4)
    together = []
    while not engine.idle:
        engine.step()
        assert sound(engine)
        groups = {one.group for one in engine._scheduler.running}
        waiting = [one for one in engine._scheduler.waiting if one.group in groups]
        together.append(not waiting)
    results = [engine.results[number] for number in sorted(engine.results)]
    expected = [independent(PROMPTS[index], 4) for index in range(3)]
    assert tokens_of(results) == expected[0][:1] + expected[1][:2] + expected[2][:2] + expected[0]
    assert engine.metrics().preemptions > 0 and all(together)


def test_samples_that_come_back_take_no_prefix_that_only_one_of_them_wrote():
    """A prompt of one token has nothing to share, but what a sample generated may begin like a registered prefix."""
    short = request(PROMPTS[0][:1], seed=2)
    expected = independent(short.prompt, 3, seed=2)
    prefix = short.prompt + expected[0][:3]
    assert all(short.prompt + tokens[:3] != prefix for tokens in expected[1:])
    engine = make_engine(paged(16, 4), burst=2, max_seqs=4)
    engine.add_prefix(prefix)
    first = engine.submit(request(PROMPTS[0], max_new_tokens=30))
    ids = engine.submit_samples(short, 3)
    results = {result.id: result for result in engine.run()}
    assert results[first].finish_reason == "length" and engine.metrics().preemptions >= 3
    assert [results[number].tokens for number in ids] == expected
    assert sound(engine)


def test_a_group_larger_than_the_pool_is_served_in_parts():
    engine = make_engine(paged(7, 16), burst=3)
    engine.submit_samples(request(), 4)
    assert tokens_of(engine.run()) == independent()
    assert engine.metrics().preemptions > 0 and engine._runner.free == 7 and sound(engine)


def test_samples_that_cannot_be_say_why():
    engine = make_engine(paged(9, 16))
    with pytest.raises(ValueError, match=r"number=5 samples cannot run at once; raise max_seqs=4"):
        engine.submit_samples(request(), 5)
    with pytest.raises(ValueError, match=r"number=0 must be an integer of at least 1"):
        engine.submit_samples(request(), 0)
    with pytest.raises(ValueError, match=r"seed=4294967296"):
        engine.submit_samples(request(seed=2**32 - 2), 3)
    with pytest.raises(TypeError, match="not tuple"):
        engine.submit_samples(PROMPT, 2)
    assert engine.idle and engine.metrics().requests == 0
    engine.submit_samples(request((1,) * 150), 2)
    assert [result.finish_reason for result in engine.run()] == ["error", "error"]
