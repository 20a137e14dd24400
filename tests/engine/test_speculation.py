"""Speculative decoding: the same tokens as one at a time, whoever drafts; what was not accepted leaves no trace."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import DraftModel, PromptLookup, Request, burst
from kvjax.spec import CacheSpec
from tests.engine.serving import (
    PREFIX,
    PROMPTS,
    assert_expected,
    contiguous,
    expected,
    greedy,
    make_engine,
    model,
    paged,
    serve,
)
from tests.engine.tiny_model import CONTEXT, TinyModel

LOOKUP = PromptLookup(tokens=3, longest=2, seen=32)
REPEATS = tuple((PREFIX[: 3 + n] * 4)[:20] for n in range(4))


class OtherModel(TinyModel):
    """The same architecture with weights slightly off: it agrees often, not always."""

    def __init__(self, noise: float):
        super().__init__()
        draw = np.random.default_rng(7)
        self.parameters = {
            name: value + noise * jnp.asarray(draw.normal(size=value.shape), jnp.float32) * jnp.std(value)
            for name, value in self.parameters.items()
        }


@cache
def drafters():
    return {
        "lookup": LOOKUP,
        "the model itself": DraftModel(model(), tokens=3),
        "a model like it": DraftModel(OtherModel(0.05), tokens=3),
        "a model unlike it": DraftModel(OtherModel(1.0), tokens=2),
    }


def sampled():
    texts = PROMPTS[:2] + REPEATS[:2]
    return [Request(p, max_new_tokens=20, temperature=0.7, top_k=8, seed=50 + i) for i, p in enumerate(texts)]


@cache
def sampled_alone():
    return [result.tokens for result in serve(make_engine(paged(64, 16)), sampled())]


@pytest.mark.parametrize("name", drafters())
def test_tokens_are_those_without_drafts(name):
    """Greedy: the reference's.  Sampled: those of the same seed, token by token, so the distribution is the same."""
    engine = make_engine(paged(96, 4), drafter=drafters()[name])
    engine.add_prefix(PREFIX)
    results = serve(engine, greedy() + sampled())
    assert_expected(results[: len(PROMPTS)], name)
    assert [result.tokens for result in results[len(PROMPTS) :]] == sampled_alone()
    metrics = engine.metrics()
    # With the same weights and the same noise every draft is right, in sampling too.
    everything = {"the model itself": metrics.accepted_tokens == metrics.drafted_tokens > 80}
    assert metrics.accepted_tokens > 0 and everything.get(name, True), metrics


def test_a_burst_that_believes_every_draft_is_caught(monkeypatch):
    monkeypatch.setattr(burst, "agreed", lambda drafts, chosen, drafted: drafted)
    engine = make_engine(paged(96, 4), drafter=drafters()["a model unlike it"])
    with pytest.raises(AssertionError):
        assert_expected(serve(engine, greedy(PROMPTS[:2])), "believed")


def test_surplus_pages_go_back_in_the_step_that_reserved_them():
    """Rows map what they committed and nothing else; the draft model's group is rolled back in the same transition."""
    engine = make_engine(paged(64, 1), drafter=drafters()["a model unlike it"], burst=3)
    for request in greedy(PROMPTS[:3]):
        engine.submit(request)
    while not engine.idle:
        engine.step()
        table = engine._runner.cache.table
        assert kvjax.check_invariants(table) == []
        assert jnp.array_equal(table.length, table.reserved) and len(table.groups) == 2
        assert all(jnp.array_equal(group.end, table.length) for group in table.groups)
    assert engine.metrics().drafted_tokens > engine.metrics().accepted_tokens


def test_the_last_pages_go_to_tokens_and_not_to_guesses():
    """Where there are pages for a token but not for its drafts, nobody gives way, and nobody stands still."""
    engine = make_engine(paged(56, 1), drafter=PromptLookup(tokens=8, longest=1, seen=64), burst=1, max_prefixes=0)
    for request in greedy(REPEATS[:2]):
        engine.submit(request)
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
        assert steps <= 2 * 24 + 8, "requests stand still"
    assert_expected(engine.run(), "a full pool")
    assert engine.metrics().preemptions == 1 and engine.metrics().drafted_tokens > 0


def test_preemption_and_cancellation_change_nothing():
    engine = make_engine(paged(26, 4), drafter=drafters()["a model like it"], burst=1)
    gone = engine.submit(Request(PROMPTS[3], max_new_tokens=24))
    results = []
    for request in greedy():
        engine.submit(request)
    for _ in range(6):
        engine.step()
    engine.cancel(gone)
    results = [result for result in engine.run() if result.id != gone]
    assert_expected(results, "a small pool")
    assert engine.metrics().preemptions > 0


def test_drafts_end_where_the_context_ends():
    """The last step drafts one token fewer than it could, or its row would pass the context and be refused."""
    engine = make_engine(paged(96, 4), drafter=drafters()["the model itself"])
    results = serve(engine, [Request(PROMPTS[3], max_new_tokens=200)])
    assert len(PROMPTS[3]) + len(results[0].tokens) == CONTEXT
    assert_expected(results, "to the last position")


def test_eos_inside_accepted_drafts_ends_the_request():
    """On the device too: a draft that is accepted after it would count."""
    plain = expected(PROMPTS[0])[0]
    # The first token comes with the prompt, then each step makes four: one that ends is neither first nor last of them.
    first = next(place for place in range(5, 24) if plain[place] not in plain[:place] and (place - 1) % 4 in (1, 2))
    engine = make_engine(paged(96, 4), drafter=drafters()["the model itself"])
    result = serve(engine, [Request(PROMPTS[0], max_new_tokens=24, eos=(plain[first],))])[0]
    assert (list(result.tokens), result.finish_reason) == (plain[: first + 1], "stop")
    assert engine.metrics().accepted_tokens == (first - 1) // 4 * 3 + (first - 1) % 4


def test_lookup_drafts_on_a_contiguous_cache_too():
    assert_expected(serve(make_engine(contiguous(4), drafter=LOOKUP), greedy()), "contiguous")


def test_a_draft_model_needs_groups_of_its_own():
    with pytest.raises(NotImplementedError, match=r"use kvjax\.init"):
        make_engine(contiguous(4), drafter=drafters()["the model itself"])


def test_vocabularies_must_agree():
    other = TinyModel()
    other.vocabulary = 60
    with pytest.raises(ValueError, match="the draft model has 60 token ids and the model 61"):
        make_engine(paged(8, 16), drafter=DraftModel(other))


@pytest.mark.parametrize("size", ["tokens", "longest", "seen"])
def test_sizes_are_checked(size):
    with pytest.raises(ValueError, match=f"PromptLookup {size}=0"):
        PromptLookup(**{size: 0})
    with pytest.raises(ValueError, match="seen=2 must exceed longest=3"):
        PromptLookup(seen=2)


def followed(history: list[int], tokens: int, longest: int) -> list[int]:
    """Prompt lookup by the book: every place, every length."""
    best, found = (-1, 0), []
    for place in range(1, len(history)):
        matched = 0
        for back in range(1, longest + 1):
            if place - back < 0 or history[place - back] != history[-back] or history[place - back] < 0:
                break
            matched += 1
        if matched:
            key = (matched, -abs(place - (len(history) - tokens)))
            if key > best or best[0] < 0:
                best, found = key, history[place : place + tokens]
    return found


@pytest.mark.parametrize("tokens", [3, 1, 200])
def test_prompt_lookup_finds_what_a_loop_finds(tokens):
    draw, lookup = np.random.default_rng(3), PromptLookup(tokens=tokens, longest=3, seen=24)
    found = 0
    for _ in range(200):
        known = int(draw.integers(1, 25))
        history = np.full(24, -1, np.int32)
        history[24 - known :] = draw.integers(0, 5, known)
        drafts = followed(history.tolist(), tokens, 3)
        given = jnp.asarray(history)[None]
        assert lookup.count(given).tolist() == [len(drafts)]
        step = burst.Drafting(given, None, None, None)
        assert lookup.draft(None, None, step)[1][0, : len(drafts)].tolist() == drafts
        found += len(drafts)
    assert found > 150


def test_joined_caches_come_apart_again():
    one, two = CacheSpec.uniform(layers=2, kv_heads=2, head_dim=8), CacheSpec.uniform(layers=3, kv_heads=1, head_dim=4)
    joined = CacheSpec.join({"target": one, "draft": two})
    assert [group.layers for group in joined.groups] == [(0, 1), (2, 3, 4)]
    assert joined.part("target") == (one, (0,)) and joined.part("draft") == (two, (1,))
    assert joined.bytes_per_token == one.bytes_per_token + two.bytes_per_token
    with pytest.raises(ValueError, match="no part 'other' was joined"):
        joined.part("other")


def test_tokens_are_told_while_the_burst_runs():
    """Every token is told once and in order, and most of them before the step that made them has returned."""
    told, early = {}, []
    engine = make_engine(
        paged(64, 16),
        drafter=LOOKUP,
        on_tokens=lambda number, tokens: (told.setdefault(number, []).extend(tokens), early.append(in_step)),
    )
    for request in greedy(PROMPTS[:4]):
        engine.submit(request)
    while not engine.idle:
        in_step = True
        engine.step()
        in_step = False
    assert {number: tuple(tokens) for number, tokens in told.items()} == {
        number: result.tokens for number, result in engine.results.items()
    }
    assert all(early) and engine.metrics().bursts > 0


def test_a_listener_that_fails_costs_nothing_but_its_own_news():
    def listen(number, tokens):
        raise RuntimeError("no more news")

    engine = make_engine(paged(64, 16), on_tokens=listen)
    for request in greedy(PROMPTS[:2]):
        engine.submit(request)
    failures = 0
    while not engine.idle:
        try:
            engine.step()
        except RuntimeError as error:
            assert "no more news" in str(error)
            failures += 1
    assert failures > 1
    assert_expected(engine.run(), "a failing listener")
