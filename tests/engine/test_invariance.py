"""No setting changes a token: pages, pools, batches, chunks, bursts, prefixes, preemption, cancellation."""

from dataclasses import dataclass

import numpy as np
import pytest

from kvjax.engine import Backing, ExtentBacking, Request
from kvjax.engine.sequence import Generation
from kvjax.pages import check_invariants
from tests.engine.serving import (
    PREFIX,
    PROMPTS,
    assert_expected,
    assert_same_tokens,
    contiguous,
    extents,
    greedy,
    make_engine,
    model,
    paged,
    serve,
)


@dataclass(frozen=True)
class Setting:
    name: str
    backing: Backing
    max_seqs: int = 4
    chunk: int = 16
    burst: int = 8
    shares_prefix: bool = False
    tight: bool = False

    def engine(self):
        engine = make_engine(self.backing, max_seqs=self.max_seqs, chunk=self.chunk, burst=self.burst)
        if self.shares_prefix:
            engine.add_prefix(PREFIX)
        return engine


SETTINGS = (
    Setting("contiguous", contiguous(4)),
    Setting("pages of 16", paged(64, 16), burst=16),
    Setting("pages of 16, few, shared prefix", paged(9, 16), burst=2, shares_prefix=True, tight=True),
    Setting("pages of 4, few", paged(32, 4), max_seqs=6, chunk=5, burst=3, tight=True),
    Setting(
        "pages of 4, few, shared prefix", paged(32, 4), max_seqs=6, chunk=64, burst=3, shares_prefix=True, tight=True
    ),
    Setting("pages of 1, few, shared prefix", paged(100, 1), max_seqs=3, burst=1, shares_prefix=True, tight=True),
    Setting("pages of 64, few, one token a chunk", paged(2, 64), max_seqs=2, chunk=1, tight=True),
    Setting("extents, few, shared prefix", extents(40, 4), max_seqs=6, burst=3, shares_prefix=True, tight=True),
)
ROOMY, SHARING = SETTINGS[1:3]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_changes_no_token(setting):
    engine = setting.engine()
    results = serve(engine, greedy())
    assert_expected(results, setting.name)
    metrics = engine.metrics()
    assert (metrics.preemptions > 0) == setting.tight
    assert metrics.copies_on_write > 0 or not setting.shares_prefix or setting.backing.page_size == 1
    if setting.backing.shares_pages:
        cache = engine._runner.cache
        assert cache.transitions.check_invariants(cache.ownership) == []
    assert (metrics.compactions > 0) == isinstance(setting.backing, ExtentBacking)


@pytest.mark.parametrize("setting", (SETTINGS[0], SHARING), ids=lambda setting: setting.name)
def test_joining_late_leaving_early_and_cancelling_change_no_token_of_others(setting):
    engine = setting.engine()
    requests = greedy()
    ids = [engine.submit(request) for request in requests[:2]]
    tokens = dict.fromkeys(range(len(requests) + 1), 0)
    while not engine.idle:
        for event in engine.step():
            tokens[event.id] += len(event.tokens)
            if len(ids) < len(requests) and event.tokens:  # one more joins whenever somebody gets tokens
                ids.append(engine.submit(requests[len(ids)]))
            if event.id in (1, 3) and tokens[event.id] >= 9:
                engine.cancel(event.id)
    reasons = [engine.results[number].finish_reason for number in ids]
    assert reasons == ["length", "cancelled", "length", "cancelled", "length", "length"]
    assert all(9 <= len(engine.results[number].tokens) < 24 for number in (1, 3))
    assert_same_tokens([engine.results[number] for number in ids], f"{setting.name}, joins and cancels")
    if setting.backing.shares_pages:
        assert check_invariants(engine._runner.cache.table) == []


def test_company_changes_no_token():
    engine = ROOMY.engine()
    for request in greedy():
        engine.submit(request)
        engine.run()
    assert_expected(engine.run(), "one at a time")


def test_order_of_arrival_changes_no_token():
    results = serve(SHARING.engine(), greedy(PROMPTS[::-1]))
    assert_expected(results, "reversed")


def test_a_long_day_of_joining_and_cancelling_at_random():
    engine = SHARING.engine()
    draw = np.random.default_rng(5)
    prompts = (*PROMPTS, *(prompt[21:] for prompt in PROMPTS), PROMPTS[5][21:] * 2)  # the last needs the whole pool
    live: set[int] = set()
    for step in range(300):
        if draw.random() < (0.5 if step % 100 < 60 else 0.05):
            prompt = prompts[draw.integers(len(prompts))]
            live.add(engine.submit(Request(prompt, max_new_tokens=int(draw.integers(1, 40)))))
        if live and draw.random() < 0.05:
            engine.cancel(int(draw.choice(sorted(live))))
        live -= {event.id for event in engine.step() if event.result is not None}
    results = engine.run()
    finished = engine.metrics().finished
    assert len(results) > 50 and finished["cancelled"] > 5 and set(finished) == {"length", "cancelled"}
    assert engine.metrics().preemptions > 20 and engine.metrics().prefixes_dropped > 0
    assert_same_tokens(results, "a long day")
    assert all(len(one.tokens) == one.request.max_new_tokens for one in results if one.finish_reason == "length")
    assert check_invariants(engine._runner.cache.table) == []
    assert engine._runner.free in (9, 7)  # the prefix may be resident


def test_sampled_tokens_depend_on_the_request_alone():
    def sampled(seed: int) -> list[Request]:
        return [
            Request(prompt, max_new_tokens=24, temperature=1.0, top_k=20, top_p=0.95, seed=seed + index)
            for index, prompt in enumerate(PROMPTS)
        ]

    alone = [serve(ROOMY.engine(), [request])[0] for request in sampled(7)[:2]]
    company = serve(ROOMY.engine(), sampled(7))
    tight = SHARING.engine()
    preempted = serve(tight, sampled(7))
    other = serve(ROOMY.engine(), sampled(8))
    assert tight.metrics().preemptions > 0
    assert [result.tokens for result in company] == [result.tokens for result in preempted]
    assert [result.tokens for result in alone] == [result.tokens for result in company[:2]]
    assert all(one.tokens != two.tokens for one, two in zip(company, other, strict=True))


def test_a_page_that_is_not_copied_on_write_is_noticed(monkeypatch):
    monkeypatch.setattr("kvjax.cache.copy_pages", lambda pool, *_: pool)
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_expected(serve(SHARING.engine(), greedy()), "no copies")


def test_a_preemption_that_forgets_a_token_is_noticed(monkeypatch):
    leave_row = Generation.leave_row

    def forgetful(generation):
        leave_row(generation)
        if generation.margins:
            generation.tokens.pop(-1)
            generation.margins.pop(-1)
            generation.tokens[-1] = 0

    monkeypatch.setattr(Generation, "leave_row", forgetful)
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_expected(serve(SHARING.engine(), greedy()), "forgetful")


def test_the_reference_attends_to_everything():
    """Were the model blind to distant tokens, equality would prove little."""
    from tests.engine.tiny_model import reference_logits

    changed = ((PROMPTS[5][0] + 1) % model().vocabulary, *PROMPTS[5][1:])
    assert abs(reference_logits(model(), PROMPTS[5]) - reference_logits(model(), changed)).max() > 0.1
