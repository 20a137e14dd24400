"""The rules of beam search: which hypotheses go on, which are finished, and when a prompt is done.

They are those of Hugging Face transformers 5.24, `generate(num_beams=…, do_sample=False)`, for a prompt by itself: what
else is in the batch changes nothing.  Nothing here knows a model or a cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.engine.beam_state import Beams, Rules


def start_beams(live: Bool[Array, " prompts"], num_beams: int, max_tokens: int) -> Beams:
    """Empty hypotheses.  Only the first beam counts at first, or all would choose the same tokens."""
    prompts = live.shape[0]
    none = jnp.full((prompts, num_beams), -jnp.inf)
    return Beams(
        live=live,
        length=jnp.zeros(prompts, jnp.int32),
        tokens=jnp.zeros((prompts, num_beams, max_tokens), jnp.int32),
        score=none.at[:, 0].set(0),
        finished_tokens=jnp.zeros((prompts, num_beams, max_tokens), jnp.int32),
        finished_length=jnp.zeros((prompts, num_beams), jnp.int32),
        finished_score=none,
        margin=jnp.full(prompts, jnp.inf),
    )


def candidates_of(num_beams: int, max_eos: int) -> int:
    """Continuations that are looked at in a step.

    A beam continues with each end token once, so this many leave `num_beams` that go on, and one more to measure by how
    much they beat it.
    """
    return max(2, 1 + max_eos) * num_beams + 1


def extend(
    beams: Beams, logits: Float32[Array, "prompts beams vocabulary"], rules: Rules
) -> tuple[Beams, Int32[Array, "prompts beams"]]:
    """One token more for every prompt.

    Returns the hypotheses, and for each that runs the beam that it continues; of prompts that are not live they mean
    nothing.  Cost: a log-softmax and a top-k over the beams' vocabularies, which must hold at least `candidates_of(…)`
    ids each.
    """
    prompts, number, vocabulary = logits.shape
    total = jax.nn.log_softmax(logits) + beams.score[..., None]
    keep = candidates_of(number, rules.eos.shape[0])
    value, place = lax.top_k(total.reshape(prompts, number * vocabulary), keep)
    source, token = place // vocabulary, place % vocabulary
    length = beams.length + 1
    last = length >= rules.max_tokens
    ends = jnp.any(token[..., None] == rules.eos, axis=-1) | last[:, None]
    prompt, candidate = jnp.arange(prompts)[:, None], jnp.arange(keep)
    tokens = beams.tokens[prompt, source].at[prompt, candidate, length[:, None] - 1].set(token, mode="drop")

    running, chosen = lax.top_k(jnp.where(ends, -jnp.inf, value), number + 1)
    # Candidates past the first `number` are there to replace those that end, and may not end themselves.
    completes = ends & (candidate < number)
    completed = jnp.where(completes, value / rules.divisor[length][:, None], -jnp.inf)
    finished, kept = lax.top_k(jnp.concatenate([beams.finished_score, completed], axis=1), number + 1)

    hope, worst = running[:, 0] / rules.hoped_divisor[length], finished[:, number - 1]
    full = worst > -jnp.inf
    stop_gap = jnp.where(full & ~rules.stop_when_full, jnp.abs(hope - worst), jnp.inf)
    gaps = (_gap(running, number), _gap(finished, number), _ending_gap(value, ends, number), stop_gap)
    # Beams that are no hypotheses yet have no logits of their own.
    sound = jnp.all(jnp.isfinite(jnp.max(logits, axis=-1)) | (beams.score == -jnp.inf), axis=1)
    margin = jnp.where(sound, jnp.minimum(beams.margin, jnp.min(jnp.stack(gaps), axis=0)), jnp.nan)
    chosen, kept = chosen[:, :number], kept[:, :number]
    lengths = jnp.broadcast_to(length[:, None], (prompts, keep))
    return Beams(
        live=beams.live & sound & (hope > worst) & ~(full & rules.stop_when_full) & ~last,
        length=length,
        tokens=tokens[prompt, chosen],
        score=running[:, :number],
        finished_tokens=jnp.concatenate([beams.finished_tokens, tokens], axis=1)[prompt, kept],
        finished_length=jnp.concatenate([beams.finished_length, lengths], axis=1)[prompt, kept],
        finished_score=finished[:, :number],
        margin=margin,
    ), source[prompt, chosen]


def _gap(descending: Float32[Array, "prompts more"], number: int) -> Float32[Array, " prompts"]:
    """By how much the last of the `number` best beats the next; infinite where there is no next."""
    return _difference(descending[:, number - 1], descending[:, number])


def _ending_gap(
    value: Float32[Array, "prompts candidates"], ends: Bool[Array, "prompts candidates"], number: int
) -> Float32[Array, " prompts"]:
    """How far the nearest ending candidate is from being on the other side of the first `number`."""
    first = jnp.arange(value.shape[1]) < number
    distance = jnp.where(
        first, _difference(value, value[:, number, None]), _difference(value[:, number - 1, None], value)
    )
    return jnp.min(jnp.where(ends, distance, jnp.inf), axis=1)


def _difference(better: Float32[Array, "*#shape"], worse: Float32[Array, "*#shape"]) -> Float32[Array, "*#shape"]:
    """By how much one score beats another; infinite where there is no other."""
    return jnp.where(worse > -jnp.inf, better - worse, jnp.inf)
