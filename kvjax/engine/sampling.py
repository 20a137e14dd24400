"""Choosing the next token: greedy, temperature, top-k and top-p, each row with noise of its own."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sampler:
    """How to sample each slot; see `Request` for the meaning of the fields."""

    temperature: Float32[Array, " slots"]
    top_k: Int32[Array, " slots"]
    top_p: Float32[Array, " slots"]
    seed: UInt32[Array, " slots"]


def sample(
    logits: Float32[Array, "slots vocabulary"], sampler: Sampler, position: Int32[Array, " slots"]
) -> tuple[Int32[Array, " slots"], Float32[Array, " slots"]]:
    """The token each slot continues with, and by how much its score beat the second best: NaN if its logits have a NaN
    or +inf among them, or nothing above −inf, and the token means nothing.

    The noise of a slot depends on its seed and on `position`, where the new token will stand in its sequence, and on
    nothing else: not on the batch, nor on how often the sequence was preempted and recomputed.  It is drawn a token id,
    not a rank, so that logits that differ in the last bit still choose the same token.

    Cost: four passes over the logits; a sort as well when any slot has a temperature.
    """
    scores = lax.cond(
        jnp.any(sampler.temperature > 0), _perturbed, lambda logits, *_: logits, logits, sampler, position
    )
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    best = jnp.max(scores, axis=-1)
    others = jnp.where(jnp.arange(scores.shape[-1]) == token[:, None], -jnp.inf, scores)
    sound = jnp.isfinite(jnp.max(logits, axis=-1))
    return token, jnp.where(sound, best - jnp.max(others, axis=-1), jnp.nan)


def _perturbed(
    logits: Float32[Array, "slots vocabulary"], sampler: Sampler, position: Int32[Array, " slots"]
) -> Float32[Array, "slots vocabulary"]:
    """Scores whose argmax is a sample of the filtered softmax (Gumbel-max); the plain logits for greedy slots."""
    random = (sampler.temperature > 0)[:, None]
    # Differences are divided, and by a normal number: a tiny temperature makes them −inf and not NaN.
    temperature = jnp.maximum(jnp.where(random, sampler.temperature[:, None], 1), jnp.finfo(jnp.float32).tiny)
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    kept = jnp.where(scaled >= _cutoff(scaled, sampler)[:, None], scaled, -jnp.inf)
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(sampler.seed, position, logits.shape[-1])
    return jnp.where(random, kept + noise, logits)


def _cutoff(scaled: Float32[Array, "slots vocabulary"], sampler: Sampler) -> Float32[Array, " slots"]:
    """The lowest scaled logit that top-k, then top-p, let through."""
    vocabulary = scaled.shape[-1]
    descending = jnp.sort(scaled, axis=-1, descending=True)
    limit = jnp.where(sampler.top_k > 0, jnp.minimum(sampler.top_k, vocabulary), vocabulary)
    within = jnp.arange(vocabulary) < limit[:, None]
    probability = jax.nn.softmax(jnp.where(within, descending, -jnp.inf), axis=-1)
    likelier = jnp.cumsum(probability, axis=-1) - probability
    # The sum of all may round to more than 1.
    reached = (likelier >= sampler.top_p[:, None]) & (sampler.top_p[:, None] < 1)
    count = jnp.sum(within & ~reached, axis=-1)
    return jnp.take_along_axis(descending, jnp.maximum(count - 1, 0)[:, None], axis=-1)[:, 0]


def _noise(seed: UInt32[Array, ""], position: Int32[Array, ""], size: int) -> Float32[Array, " size"]:
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (size,))
