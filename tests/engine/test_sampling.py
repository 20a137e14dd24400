"""Sampling: what the filters let through, how often, and that a slot's noise is its own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.engine import sampling
from kvjax.engine.request import LARGEST_FLOAT
from kvjax.engine.sampling import Sampler, sample

jitted = jax.jit(sample)
draw = np.random.default_rng(0)
LOGITS = draw.normal(scale=2.0, size=12).astype(np.float32)


def sampler(number, *, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    return Sampler(
        jnp.full(number, temperature, jnp.float32),
        jnp.full(number, top_k, jnp.int32),
        jnp.full(number, top_p, jnp.float32),
        jnp.full(number, seed, jnp.uint32),
    )


def samples(number=4096, **settings):
    """Samples of `LOGITS` at `number` positions."""
    logits = jnp.tile(LOGITS, (number, 1))
    return np.asarray(jitted(logits, sampler(number, **settings), jnp.arange(number, dtype=jnp.int32))[0])


def frequencies(tokens):
    return np.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


def softmax(logits):
    weight = np.exp(logits - logits.max())
    return weight / weight.sum()


@pytest.mark.parametrize(
    "settings",
    [{"temperature": temperature} for temperature in (0.0, 1e-4, 1e-38, 1e-41)] + [{"top_k": 1}, {"top_p": 1e-6}],
)
def test_ways_to_be_greedy(settings):
    assert set(samples(256, **settings)) == {LOGITS.argmax()}


def test_no_temperature_costs_a_slot_its_margin():
    """Logits divided by less than 1 / float32's range are infinite, and infinities have no differences."""
    temperature = jnp.asarray([1e-41, 2e-38, 1e-30, 1.0, LARGEST_FLOAT], jnp.float32)
    settings = replace(sampler(5), temperature=temperature)
    margin = jitted(jnp.tile(LOGITS * 100, (5, 1)), settings, jnp.zeros(5, jnp.int32))[1]
    assert not np.isnan(margin).any()


def test_top_p_of_one_lets_everything_through():
    """Also where the probabilities of the likeliest, summed in float32, round to 1."""
    logits = jnp.asarray(np.log(np.r_[np.full(3, 1 / 3), np.full(200, 1e-9)])[None], jnp.float32)
    cutoff = sampling._cutoff(logits, sampler(1))
    assert float(cutoff[0]) == float(logits.min())


def test_margins_of_greedy_slots_are_between_the_best_two_logits():
    margin = jitted(LOGITS[None], sampler(1, temperature=0.0), jnp.zeros(1, jnp.int32))[1]
    second, first = np.sort(LOGITS)[-2:]
    np.testing.assert_array_equal(margin, [first - second])


def test_equal_logits_have_no_margin_and_the_first_wins():
    token, margin = jitted(jnp.array([[0.0, 3, 1, 3]]), sampler(1, temperature=0.0), jnp.zeros(1, jnp.int32))
    assert (int(token[0]), float(margin[0])) == (1, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    expected = softmax(LOGITS / temperature)
    # 4096 samples: a frequency's standard deviation is below 0.008; positions are fixed, so this never flickers.
    np.testing.assert_allclose(frequencies(samples(temperature=temperature)), expected, atol=0.03)


def test_top_k_keeps_the_k_likeliest():
    best = np.argsort(LOGITS)[-3:]
    expected = np.zeros(len(LOGITS))
    expected[best] = softmax(LOGITS[best])
    found = frequencies(samples(top_k=3))
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert set(np.flatnonzero(found)) == set(best)


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p):
    order = np.argsort(LOGITS)[::-1]
    reached = np.searchsorted(np.cumsum(softmax(LOGITS)[order]), top_p) + 1
    assert set(samples(top_p=top_p)) == set(order[:reached])


def test_top_p_counts_what_top_k_left():
    order = np.argsort(LOGITS)[::-1]
    reached = np.searchsorted(np.cumsum(softmax(LOGITS[order[:4]])), 0.9) + 1
    assert set(samples(top_k=4, top_p=0.9)) == set(order[:reached])


def test_more_tokens_than_there_are_can_be_asked_for():
    assert set(samples(64, top_k=1000)) <= set(range(len(LOGITS)))


def together_and_alone(function):
    """Five slots of different kinds in one call, and each in a call of its own."""
    logits = jnp.asarray(draw.normal(scale=2.0, size=(5, 12)), jnp.float32)
    mixed = Sampler(
        jnp.array([0.0, 1.0, 0.7, 1.5, 1.0]),
        jnp.array([0, 0, 5, 0, 3], jnp.int32),
        jnp.array([1.0, 1.0, 1.0, 0.8, 0.9]),
        jnp.array([1, 2, 3, 2**32 - 1, 2], jnp.uint32),
    )
    position = jnp.array([4, 9, 9, 2, 9], jnp.int32)
    together = function(logits, mixed, position)[0]
    alone = [
        function(logits[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], mixed), position[i : i + 1])[0][0]
        for i in range(5)
    ]
    return together.tolist(), [int(token) for token in alone]


def test_a_slot_samples_the_same_in_any_company():
    for _ in range(8):
        together, alone = together_and_alone(jitted)
        assert together == alone


def test_noise_by_slot_is_noticed():
    def by_slot(logits, sampler, position):
        return jitted(logits, sampler, position + jnp.arange(len(position), dtype=jnp.int32))

    assert any(together != alone for together, alone in (together_and_alone(by_slot) for _ in range(8)))


def test_seeds_and_positions_give_other_noise():
    assert (samples(64, seed=1) != samples(64, seed=2)).any()
    assert len(set(samples(64))) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_slots_whose_logits_are_sound_have_a_margin(temperature):
    inf, nan = float("inf"), float("nan")
    logits = jnp.array([[1.0, 2, 3], [1, nan, 3], [inf, 1, 2], [inf, inf, 1], [-inf, -inf, -inf], [-inf, 2, -inf]])
    settings = sampler(len(logits), temperature=temperature)
    token, margin = jitted(logits, settings, jnp.arange(len(logits), dtype=jnp.int32))
    assert np.isnan(margin).tolist() == [False, True, True, True, True, False]
    assert int(token[5]) == 1 and margin[5] == inf
