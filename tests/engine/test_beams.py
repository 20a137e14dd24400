"""Beam search whatever the pages: sizes change nothing, little memory is refused cleanly, and all of it is in place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import BeamOptions, BeamSearch
from kvjax.engine.beam_loop import beam_search
from kvjax.engine.beam_state import Prompts
from tests.engine.tiny_model import VOCABULARY, TinyModel, reference_logits

OPTIONS = BeamOptions(num_beams=3, max_new_tokens=16, length_penalty=0.5, num_return_sequences=3, eos=(7, 11))
PROMPTS = [np.random.default_rng(n).integers(0, VOCABULARY, n).tolist() for n in (13, 1, 30, 8)]


@pytest.fixture(scope="module")
def model():
    return TinyModel()


@pytest.fixture(scope="module")
def roomy(model):
    """A search with pages for all; everything but a batch of four prompts in it is traced again, which fails."""
    chex.clear_trace_counter()
    beams = BeamSearch(model, rows=13, num_pages=64, page_size=4, max_context=256)

    @partial(chex.assert_max_traces, n=1)
    def once(parameters, cache, prompts, rules, *, num_beams):
        return beam_search(model, 64, parameters, cache, prompts, rules, num_beams=num_beams)

    beams._search = jax.jit(once, static_argnames="num_beams", donate_argnames="cache")
    return beams


@pytest.fixture(scope="module")
def found(roomy):
    return roomy.run(PROMPTS, OPTIONS)


def assert_same(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert [one.tokens for one in result.hypotheses] == [one.tokens for one in other.hypotheses]
        np.testing.assert_allclose(
            [one.score for one in result.hypotheses], [one.score for one in other.hypotheses], atol=1e-4
        )


def assert_empty(cache):
    assert kvjax.check_invariants(cache.table) == []
    assert int(cache.table.groups[0].held) == 0
    assert not cache.table.length.any()


def test_scores_are_those_of_the_sequences(model, found):
    """Recomputed from nothing in float64: the sum of log-probabilities over length ** penalty."""
    for prompt, result in zip(PROMPTS, found.results, strict=True):
        assert len(result.hypotheses) == 3
        for hypothesis in result.hypotheses:
            total = 0.0
            for place, token in enumerate(hypothesis.tokens):
                logits = reference_logits(model, prompt + list(hypothesis.tokens[:place]))
                total += logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert abs(hypothesis.score - total / len(hypothesis.tokens) ** 0.5) < 1e-3


@pytest.mark.parametrize(("page_size", "num_pages", "chunk"), [(1, 480, 7), (48, 12, 200)])
def test_pages_and_chunks_change_nothing(model, found, page_size, num_pages, chunk):
    beams = BeamSearch(model, rows=12, num_pages=num_pages, page_size=page_size, max_context=48, chunk=chunk)
    assert_same(beams.run(PROMPTS, OPTIONS).results, found.results)
    assert_empty(beams.cache)


def test_company_and_earlier_batches_change_nothing(roomy, found):
    for batch in ([2, 0, 1, 3], [1, 1, 2, 1], [3, 2, 0, 0]):
        assert_same(roomy.run([PROMPTS[n] for n in batch], OPTIONS).results, [found.results[n] for n in batch])
        assert_empty(roomy.cache)


def test_a_dry_pool_costs_the_last_prompts_their_place_and_nobody_a_token(roomy, found):
    """From too few pages for anybody to enough for all: never a wrong sequence.  Another row holds the rest."""
    served = []
    for left in (1, 10, 16, 20, 24, 28, 34, 44):
        roomy.cache = occupy(roomy.cache, 64 - left)
        report = roomy.run(PROMPTS, OPTIONS)
        kept = [index for index, result in enumerate(report.results) if result.status == kvjax.Status.OK]
        refused = [result for result in report.results if result.status != kvjax.Status.OK]
        assert all(result.status == kvjax.Status.OUT_OF_PAGES and not result.hypotheses for result in refused)
        assert_same([report.results[index] for index in kept], [found.results[index] for index in kept])
        roomy.cache, _ = kvjax.release(roomy.cache, jnp.arange(13) == 12, max_pages=64)
        assert_empty(roomy.cache)
        served.append(len(kept))
    print(f"prompts served as the pool grows: {served}")
    assert served[0] <= 1 and served[-1] == 4 and {2, 3} <= set(served) and served == sorted(served)


def occupy(cache, pages):
    """The last row holds so many pages."""
    tokens = jnp.zeros(cache.rows, jnp.int32).at[-1].set(4 * pages)
    cache, grant = kvjax.reserve(kvjax.advance(cache), tokens, max_tokens=256)
    kvjax.raise_for_status(grant.status)
    return kvjax.commit(cache, grant.tokens)


def test_sharing_is_counted(found):
    """Held are at most the pages of unshared beams, and copies at most one a beam and step."""
    assert len(found.held) == len(found.unshared) <= OPTIONS.max_new_tokens
    assert all(0 < held <= unshared for held, unshared in zip(found.held, found.unshared, strict=True))
    # Prompts alone at first: 4 + 1 + 8 + 2 pages of 4 tokens, each in one row.
    assert found.held[0] == found.unshared[0] == 15
    # In the second step three beams share all full pages of their prompt and differ in the last: 3 rows · 15 or so.
    assert found.unshared[1] == 3 * sum(-(-(len(prompt) + 1) // 4) for prompt in PROMPTS)
    assert found.held[1] == sum(len(prompt) // 4 + 3 for prompt in PROMPTS)
    assert 0 < found.copies <= 12 * len(found.held)
    assert found.peak[0] == max(found.held) and 0 < found.saved < 1 and 0 < found.saved_at_peak < 1
    nothing = replace(found, held=(), unshared=())
    assert (nothing.peak, nothing.saved, nothing.saved_at_peak) == ((0, 0), 0, 0)


def test_one_trace_and_one_buffer_serve_all_options(roomy):
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(roomy.cache.pools)]
    results = set()
    for penalty, stopping in ((-1.0, True), (1.0, False), (2.0, "never")):
        options = replace(OPTIONS, length_penalty=penalty, early_stopping=stopping, eos=(3, 12))
        results.add(roomy.run(PROMPTS, options).results)
    assert len(results) == 3
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(roomy.cache.pools)] == addresses


@pytest.mark.parametrize("looks_back", [False, True])
def test_the_whole_search_is_in_place(model, looks_back):
    """The cache is aliased and nothing of the pool's size is copied; a search that looks back at its input fails."""

    def run(parameters, cache, prompts, rules):
        after, found = beam_search(model, 16, parameters, cache, prompts, rules, num_beams=3)
        counts = cache if looks_back else after
        return after, found, counts.table.groups[0].refcount[found.steps]

    prompts = Prompts(jnp.zeros((2, 16), jnp.int32), jnp.full(2, 16, jnp.int32))
    build = partial(kvjax.init, model.spec, rows=6, num_pages=1 << 20, page_size=4, max_context=48, backend="xla")
    cache = jax.eval_shape(build)
    lowered = jax.jit(run, donate_argnums=1).lower(model.parameters, cache, prompts, OPTIONS.rules)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    # The smallest array that grows with the pool has four bytes a page.
    assert (memory.temp_size_in_bytes >= 4 << 20) == looks_back


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_beams": 1}, "greedy"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": 40.0}, "beyond float32"),
        ({"early_stopping": "maybe"}, "early_stopping='maybe'"),
        ({"num_return_sequences": 5}, "num_return_sequences=5"),
        ({"eos": (-1,)}, "eos="),
        ({"eos": (1.5,)}, "eos holds 1.5, which is no token id"),
        ({"eos": 7}, "eos=7 must be a sequence"),
        ({"length_penalty": "1"}, "length_penalty='1' must be a number"),
    ],
)
def test_options_out_of_range_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        BeamOptions(**wrong)


def test_batches_that_cannot_be_searched_are_refused(model):
    beams = BeamSearch(model, rows=6, num_pages=64, page_size=4, max_context=48)
    for prompts, options, message in (
        ([], OPTIONS, "no prompts"),
        (PROMPTS, OPTIONS, "4 prompts of 3 beams need more than the cache's 6 rows"),
        ([[1], []], OPTIONS, "prompt 1: the prompt is empty"),
        ([[1], [2.5]], OPTIONS, "prompt 1 holds 2.5, which is no token id"),
        ([1, 2], OPTIONS, "prompt 0=1 must be a sequence"),
        (np.zeros((0, 4), np.int32), OPTIONS, "no prompts"),
        ([[1, VOCABULARY]], OPTIONS, f"holds {VOCABULARY}, no id"),
        ([[1] * 33], OPTIONS, "33 prompt tokens and max_new_tokens=16 are more than the 48 positions"),
        ([[1]], BeamOptions(num_beams=6, eos=tuple(range(10))), "choose among 67 ids"),
    ):
        with pytest.raises(ValueError, match=message):
            beams.run(prompts, options)


class PoisonedModel(TinyModel):
    """Gives NaN after the token at position 29."""

    def forward(self, parameters, cache, grant, tokens):
        hidden, cache = super().forward(parameters, cache, grant, tokens)
        return jnp.where(grant.position[:, None] == 29, jnp.nan, hidden), cache


def test_nan_logits_end_their_prompt_alone(found):
    beams = BeamSearch(PoisonedModel(), rows=12, num_pages=160, page_size=4, max_context=48)
    report = beams.run(PROMPTS, OPTIONS)
    assert [result.error for result in report.results] == [None, None, "the model's logits are not finite", None]
    assert report.results[2].hypotheses == ()
    assert_same([report.results[n] for n in (0, 1, 3)], [found.results[n] for n in (0, 1, 3)])
    assert_empty(beams.cache)
