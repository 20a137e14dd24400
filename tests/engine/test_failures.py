"""What fails in one request or in the caller's code costs nobody else anything; a broken cache is told at once."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from kvjax.engine import Engine, PromptLookup, Request
from kvjax.grant import make_grant
from kvjax.pages import Fault, PageTableError, raise_for_status
from tests.engine.serving import (
    PROMPTS,
    assert_same_tokens,
    expected,
    greedy,
    make_engine,
    model,
    paged,
    serve,
)
from tests.engine.tiny_model import TinyModel


def roomy(served=None, **settings):
    sizes = {"max_seqs": 4, "chunk": 16, "burst": 16, "smallest_bucket": 64}
    return Engine(served or model(), paged(64, 16), **(sizes | settings))


def assert_only_the_first_failed(results, error):
    assert (results[0].finish_reason, results[0].error) == ("error", error)
    assert all(result.finish_reason == "length" for result in results[1:])
    assert_same_tokens(results, error)


FORBIDDEN = next(token for token in expected(PROMPTS[0])[0] if all(token not in expected(p)[0] for p in PROMPTS[1:3]))


@pytest.mark.parametrize("broken", ["raises", "no string"])
def test_a_decode_that_fails_ends_only_the_request_it_failed_for(broken):
    def decode(ids):
        if FORBIDDEN not in ids:
            return "x" * len(ids)
        return None if broken == "no string" else {}["lost"]

    engine = roomy(decode=decode)
    results = serve(engine, greedy(PROMPTS[:3]))
    error = "decode gave NoneType, not a string" if broken == "no string" else "decode raised KeyError: 'lost'"
    assert_only_the_first_failed(results, error)
    before = expected(PROMPTS[0])[0].index(FORBIDDEN)
    assert results[0].text == "x" * before and len(results[0].tokens) == before + 1
    assert engine._runner.free == 64 and engine.metrics().finished == {"error": 1, "length": 2}


def test_a_decode_that_fails_on_the_last_bytes_is_an_error_too():
    def decode(ids):
        if len(ids) > 3:
            raise ValueError("too many")
        return "\ufffd" * bool(ids)

    (result,) = serve(roomy(decode=decode), [Request(PROMPTS[0], max_new_tokens=3)])
    assert (result.finish_reason, result.text) == ("length", "\ufffd")
    engine = roomy(decode=decode)
    engine.submit(Request(PROMPTS[0], max_new_tokens=9))
    (result,) = engine.run()
    assert (result.finish_reason, result.error, result.text) == ("error", "decode raised ValueError: too many", "")


def test_what_on_event_raises_loses_no_event():
    calm, engine = roomy(), roomy()
    for one in (calm, engine):
        for request in greedy(PROMPTS[:3]):
            one.submit(request)
    told, untold = [], []
    calm.run(untold.append)

    def listen(event):
        told.append(event)
        if len(told) % 2:
            raise RuntimeError("the listener broke")

    raised = 0
    while not engine.idle:
        try:
            engine.run(listen)
        except RuntimeError:
            raised += 1
    assert raised == (len(untold) + 1) // 2 > 1
    assert told == untold and engine.run() == calm.run()


def test_what_is_no_request_is_refused_and_leaves_no_trace():
    engine = roomy()
    with pytest.raises(TypeError, match=r"kvjax.engine.Request, not tuple"):
        engine.submit((1, 2, 3))
    assert engine.idle and engine.metrics().requests == 0
    assert engine.submit(greedy()[0]) == 0


class Poisoned(TinyModel):
    """Its logits after token `FORBIDDEN` hold `poison` instead of the last one."""

    def __init__(self, poison):
        super().__init__()
        self.poison = poison

    def forward(self, parameters, cache, grant, tokens):
        hidden, cache = super().forward(parameters, cache, grant, tokens)
        return jnp.concatenate([hidden, (tokens == FORBIDDEN)[:, None]], axis=1), cache

    def logits(self, parameters, hidden):
        logits = super().logits(parameters, hidden[:, :-1])
        return jnp.where(hidden[:, -1:] > 0, self.poison, logits)


def test_logits_that_are_not_finite_end_only_their_request():
    results = serve(roomy(Poisoned(float("nan"))), greedy(PROMPTS[:3]))
    known = expected(PROMPTS[0])[0].index(FORBIDDEN) + 1
    assert_only_the_first_failed(results, f"the model's logits after {len(PROMPTS[0]) + known} tokens are not finite")
    assert len(results[0].tokens) == known


def test_a_single_possible_token_is_no_failure():
    """Its margin is infinite and its logits are sound."""
    (result,) = serve(roomy(), [Request(PROMPTS[0], max_new_tokens=24, temperature=1.0, top_k=1)])
    assert (result.finish_reason, list(result.tokens)) == ("length", expected(PROMPTS[0])[0])
    assert set(result.margins) == {float("inf")}


@pytest.mark.parametrize(
    "method, change, message",
    [
        ("logits", lambda x: x[:, :-1], r"logits gave logits of shape \(4, 60\).*needs \[4, 61\] of float32"),
        ("logits", lambda x: x.astype(jnp.bfloat16), r"dtype bfloat16; the engine needs \[4, 61\] of float32"),
        ("logits", lambda x: x[None], r"shape \(1, 4, 61\)"),
        ("forward", lambda x: x[:-1], r"forward gave hidden states of shape \(63, 32\).*needs \[64, width\] of floats"),
        ("forward", lambda x: x.astype(jnp.int32), r"dtype int32; the engine needs \[64, width\] of floats"),
    ],
)
def test_outputs_of_the_wrong_kind_say_what_was_expected(monkeypatch, method, change, message):
    right = getattr(TinyModel, method)

    def wrong(*arguments):
        out = right(*arguments)
        return change(out) if method == "logits" else (change(out[0]), out[1])

    monkeypatch.setattr(TinyModel, method, wrong)
    with pytest.raises(ValueError, match=message):
        serve(roomy(), greedy(PROMPTS[:1]))


@pytest.mark.parametrize("burst", [False, True])
def test_sticky_faults_of_the_page_table_are_raised(burst):
    engine = roomy()
    engine.submit(greedy()[0])
    if burst:
        engine.step()
        engine.step()
    runner = engine._runner
    faults = jnp.int32(Fault.UNDERFLOW | Fault.COMMIT_REFUSED)
    runner.cache = replace(runner.cache, table=replace(runner.cache.table, faults=faults))
    with pytest.raises(PageTableError, match=r"no longer sound.*UNDERFLOW\|COMMIT_REFUSED"):
        engine.step()


@pytest.mark.parametrize(
    ("settings", "kind", "problem"),
    [
        ({"drafter": "lookup"}, TypeError, "pass PromptLookup"),
        ({"drafter": PromptLookup}, TypeError, "pass PromptLookup"),
        ({"on_tokens": 3}, TypeError, "on_tokens=3 cannot be called"),
        ({"host_bytes": 8}, ValueError, "host_bytes=8 is for preemption='swap'"),
        ({"preemption": "swap"}, ValueError, "needs host_bytes"),
        ({"preemption": "drop"}, ValueError, "must be 'recompute' or 'swap'"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings, kind, problem):
    with pytest.raises(kind, match=problem):
        make_engine(paged(8, 16), **settings)


def test_a_grant_is_no_status():
    grant = make_grant(*(jnp.zeros(2, jnp.int32) for _ in range(3)), 1)
    with pytest.raises(TypeError, match=r"pass its \.status"):
        raise_for_status(grant)
