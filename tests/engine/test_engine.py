"""The engine's behaviour, request by request: how they end, what is told, what one failure costs the others."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import Engine, PageMap, Request
from tests.engine.serving import (
    PREFIX,
    PROMPTS,
    assert_same_tokens,
    contiguous,
    expected,
    greedy,
    make_engine,
    model,
    paged,
    serve,
)


def letters(ids):
    """Text of the tiny model: a character a token."""
    return "".join(chr(ord("0") + token) for token in ids)


def roomy(**settings):
    return make_engine(paged(64, 16), burst=16, **settings)


@pytest.fixture(params=["paged", "contiguous"])
def engine(request):
    if request.param == "paged":
        return roomy(decode=letters)
    return make_engine(contiguous(4), decode=letters)


def test_an_eos_id_ends_a_request_and_is_kept(engine):
    tokens, _ = expected(PROMPTS[0])
    end = next(index for index, token in enumerate(tokens) if index > 4 and token not in tokens[:index])
    (result,) = serve(engine, [Request(PROMPTS[0], max_new_tokens=24, eos=(60, tokens[end]))])
    assert (result.finish_reason, list(result.tokens)) == ("stop", tokens[: end + 1])


def test_a_stop_string_across_tokens_ends_a_request(engine):
    tokens, _ = expected(PROMPTS[1])
    text = letters(tokens)
    end = next(index for index in range(5, 20) if text.find(text[index : index + 3]) == index)
    (result,) = serve(engine, [Request(PROMPTS[1], max_new_tokens=24, stop=("nowhere", text[end : end + 3]))])
    assert (result.finish_reason, result.text) == ("stop", text[:end])
    assert list(result.tokens) == tokens[: end + 3] and len(result.margins) == end + 3


def test_the_context_ends_a_request():
    (result,) = serve(roomy(), [Request(PROMPTS[5][:60] * 2 + PROMPTS[5][:30], max_new_tokens=100)])
    assert (result.finish_reason, len(result.tokens)) == ("length", model().max_context - 150)


def test_events_add_up_to_results(engine):
    requests = greedy()
    told = {index: ([], "") for index in range(len(requests))}
    ends = {}

    def listen(event):
        tokens, text = told[event.id]
        told[event.id] = ([*tokens, *event.tokens], text + event.text)
        if event.result is not None:
            ends[event.id] = event.result

    for request in requests:
        engine.submit(request)
    results = engine.run(listen)
    assert [ends[index] for index in sorted(ends)] == results
    assert [told[result.id] for result in results] == [(list(result.tokens), result.text) for result in results]
    assert [result.text for result in results] == [letters(expected(prompt)[0]) for prompt in PROMPTS]
    assert engine.idle and engine.step() == []


def test_requests_that_can_never_be_served_end_at_once_and_others_go_on():
    engine = make_engine(paged(9, 16), burst=2)
    bad = [Request((61,)), Request((3, -1)), Request((1,) * 160), Request((1,) * 150), Request((1,), stop=("x",))]
    results = serve(engine, [*bad, *greedy(PROMPTS[:2])])
    errors = [result.error for result in results if result.finish_reason == "error"]
    assert errors == [
        "prompt holds token id 61; the vocabulary is 0 … 60",
        "prompt holds token id -1; the vocabulary is 0 … 60",
        "prompt of 160 tokens leaves no room in a context of 160",
        "prompt of 150 tokens does not fit the cache of 9 pages of 16 tokens; raise num_pages",
        "stop strings need a tokenizer, and there is none; use eos ids",
    ]
    assert_same_tokens(results[len(bad) :], "beside errors")
    assert [result.finish_reason for result in results[len(bad) :]] == ["length", "length"]


def test_a_request_that_outgrows_the_whole_pool_ends_with_an_error_and_nothing_else_is_lost():
    engine = make_engine(paged(9, 16), burst=2)
    engine.add_prefix(PREFIX)
    results = serve(engine, [*greedy(PROMPTS[:2]), Request(PROMPTS[5], max_new_tokens=92), *greedy(PROMPTS[2:])])
    assert [result.finish_reason for result in results] == ["length"] * 2 + ["error"] + ["length"] * 4
    assert results[2].error == "the cache of 9 pages of 16 tokens is full after 145 tokens; raise num_pages"
    assert len(results[2].tokens) == 77
    assert_same_tokens(results, "beside one that outgrew the pool")
    assert engine.metrics().prefixes_dropped >= 1  # it was given every page there was


def test_the_prefix_is_computed_once_and_again_after_it_was_dropped():
    engine = make_engine(paged(9, 16), burst=2)
    engine.add_prefix(PREFIX)
    serve(engine, greedy(PROMPTS[:2]))
    # Both share 21 tokens; the last token of each is never computed.
    assert engine.metrics().computed_tokens == 21 + (5 + 23) + (20 + 23)
    other = tuple(range(60)) * 2
    serve(engine, [Request(other, max_new_tokens=8)])
    assert engine.metrics().prefixes_dropped == 1
    results = serve(engine, greedy(PROMPTS[:1]))
    assert results[-1].tokens == results[0].tokens
    assert engine.metrics().computed_tokens == 21 + (5 + 23) + (20 + 23) + (120 + 7) + (21 + 5 + 23)


def test_a_prompt_that_is_the_prefix_is_served_without_it():
    engine = roomy()
    engine.add_prefix(PROMPTS[0])
    (result,) = serve(engine, greedy(PROMPTS[:1]))
    assert_same_tokens([result], "the prefix itself")


@pytest.mark.parametrize("when", ["before the first step", "while waiting", "while running"])
def test_cancelling(when):
    engine = roomy()
    ids = [engine.submit(request) for request in greedy()]
    victim = ids[5] if when == "while waiting" else ids[0]
    if when != "before the first step":
        engine.step()
    assert engine.cancel(victim)
    results = engine.run()
    assert results[victim].finish_reason == "cancelled"
    assert [result.finish_reason for result in results].count("length") == 5
    assert_same_tokens(results, when)
    assert not engine.cancel(victim) and not engine.cancel(99)
    assert engine._runner.free == 64


def test_bad_settings_say_what_to_do():
    with pytest.raises(ValueError, match="max_seqs=0 must be an integer of at least 1"):
        Engine(model(), paged(8, 16), max_seqs=0)
    with pytest.raises(ValueError, match="max_prefixes=-1 must be an integer of at least 0"):
        Engine(model(), paged(8, 16), max_prefixes=-1)
    with pytest.raises(ValueError, match="num_pages=0"):
        Engine(model(), paged(0, 16))
    with pytest.raises(ValueError, match="page_size"):
        Engine(model(), paged(8, 0))
    with pytest.raises(ValueError, match=r"rows=3.*the engine, 4"):
        Engine(model(), contiguous(3), max_seqs=4)
    with pytest.raises(ValueError, match="page map"):
        Engine(model(), contiguous(4), max_seqs=4, page_map=PageMap())


def test_bad_prefixes_say_what_to_do():
    engine = make_engine(paged(9, 16), burst=2)
    engine.add_prefix(PREFIX)
    engine.add_prefix(PREFIX)
    with pytest.raises(ValueError, match="at least one token"):
        engine.add_prefix(())
    with pytest.raises(ValueError, match="raise max_prefixes"):
        engine.add_prefix(PROMPTS[0])
    with pytest.raises(ValueError, match="raise num_pages"):
        engine.add_prefix((1,) * 150)


@pytest.mark.parametrize(
    "fault, message",
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"stop": ("",)}, "empty string"),
        ({"eos": tuple(range(9))}, "at most 8"),
        ({"prompt": 5}, "prompt=5 must be a sequence of token ids"),
        ({"prompt": np.array([[1, 2]])}, "prompt holds .1, 2., which is no token id"),
        ({"prompt": np.array([1.5])}, "prompt holds 1.5, which is no token id"),
        ({"prompt": np.array([], np.int32)}, "prompt is empty"),
        ({"stop": "ab"}, "stop='ab' must be a tuple of strings"),
        ({"stop": (b"ab",)}, "must be a tuple of strings"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be an integer"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"seed": 1.0}, "seed=1.0 must be an integer"),
    ],
)
def test_bad_requests_name_the_field(fault, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt": (1,)} | fault))


@pytest.mark.parametrize("make", [list, np.array, lambda ids: np.array(ids, np.uint16), jnp.array])
def test_token_ids_may_come_in_any_sequence_or_array(make):
    request = Request(make([3, 1, 4]), eos=make([5]), stop=["x"])
    assert request == Request((3, 1, 4), eos=(5,), stop=("x",))
    assert all(type(token) is int for token in (*request.prompt, *request.eos))


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_burst_ends_with_a_request_when_another_waits_for_its_place(waiting):
    engine = make_engine(paged(64, 16))
    prompt = PROMPTS[0][:3]
    ids = [engine.submit(Request(prompt, max_new_tokens=number)) for number in (3, 24, 24, 24)]
    if waiting:
        engine.submit(Request(prompt, max_new_tokens=2))
    told = dict.fromkeys(range(5), 0)
    while ids[0] not in engine.results:
        for event in engine.step():
            told[event.id] += len(event.tokens)
    # One token with the prompt; then a burst, of eight steps unless somebody waits.
    assert [told[number] for number in ids] == ([3, 3, 3, 3] if waiting else [3, 9, 9, 9])
