"""The tiny model with a cache in the midst of serving: prompts read, and the rest of their tokens to decode."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from tests.engine.serving import PROMPTS as ALL_PROMPTS
from tests.engine.serving import model

PROMPTS = ALL_PROMPTS[:3]
STEPS = 12


def prefilled(mesh=None) -> tuple[kvjax.KVCache, np.ndarray]:
    """A cache that has read `PROMPTS`, row 1 empty in between, and the first new token of each prompt."""
    cache = kvjax.init(model().spec, rows=4, num_pages=64, page_size=4, max_context=160, backend="xla", mesh=mesh)
    rows = (0, 2, 3)
    table = np.zeros((4, max(map(len, PROMPTS))), np.int32)
    counts = np.zeros(4, np.int32)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        table[row, : len(prompt)], counts[row] = prompt, len(prompt)
    cache, tokens = _prefill(cache, jnp.asarray(table), jnp.asarray(counts))
    return cache, np.asarray(tokens)[list(rows)]


def decode_on(cache: kvjax.KVCache, tokens: np.ndarray) -> np.ndarray:
    """The next `STEPS` greedy tokens of each prompt, by a cache that was `prefilled`; it stays as it is."""
    first = np.zeros(4, np.int32)
    first[[0, 2, 3]] = tokens
    return np.asarray(_decode(cache, jnp.asarray(first)))[[0, 2, 3]]


@partial(jax.jit, donate_argnames="cache")
def _prefill(cache, table, counts):
    cache, grant = kvjax.reserve(cache, counts, max_tokens=128)
    tokens = table.at[grant.row, grant.position].get(mode="clip")
    hidden, cache = model().forward(model().parameters, cache, grant, tokens)
    logits = model().logits(model().parameters, hidden.at[grant.last].get(mode="clip"))
    return kvjax.commit(cache, grant.tokens), jnp.argmax(logits, -1).astype(jnp.int32)


@jax.jit
def _decode(cache, first):
    live = (cache.table.length > 0).astype(jnp.int32)

    def step(carry, _):
        cache, token = carry
        cache, grant = kvjax.reserve(cache, live, max_tokens=4)
        hidden, cache = model().forward(model().parameters, cache, grant, token.at[grant.row].get(mode="clip"))
        logits = model().logits(model().parameters, hidden.at[grant.last].get(mode="clip"))
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (kvjax.commit(cache, grant.tokens), token), token

    return jax.lax.scan(step, (cache, first), length=STEPS)[1].T
