"""Runs a model through a cache in the plainest way, for tests: chunked prefill, then greedy decode in one program."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

import kvjax
from kvjax.models import Model

FIXTURES = Path(__file__).parents[1] / "fixtures"


def oracle(name: str) -> list[dict[str, Any]]:
    """The oracle's runs in a fixture: ids, tokens and margins of each."""
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))["prompts"]


def make_cache(kind: str, model: Model, rows: int, max_context: int) -> Any:
    """A paged cache with just enough pages of 16 tokens, or a contiguous one."""
    if kind == "contiguous":
        return kvjax.init_contiguous(model.spec, rows=rows, max_context=max_context)
    num_pages = rows * -(-max_context // 16)
    return kvjax.init(model.spec, rows=rows, num_pages=num_pages, page_size=16, max_context=max_context, backend="xla")


def greedy(model: Model, prompts: list[list[int]], steps: int, *, kind: str = "paged", chunk: int = 32) -> np.ndarray:
    """Greedy tokens `[rows, steps]` of all prompts at once, prefilled `chunk` tokens a row at a time."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    table = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(table, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = make_cache(kind, model, len(prompts), int(lengths.max()) + steps)
    first = jnp.zeros(len(prompts), jnp.int32)
    for start in range(0, int(lengths.max()), chunk):
        counts = jnp.asarray(np.clip(lengths - start, 0, chunk), jnp.int32)
        cache, token, _ = _prefill(model, model.parameters, cache, jnp.asarray(table), counts, chunk * len(prompts))
        first = jnp.where(counts > 0, token, first)
    return np.concatenate([first[:, None], _decode(model, model.parameters, cache, first, steps - 1)], axis=1)


def teacher_forced(model: Model, ids: list[int], *, kind: str = "paged", chunk: int = 64) -> Float32[Array, "n v"]:
    """Logits at every one of `ids`, read through the cache `chunk` tokens at a time; len(ids) a multiple of it."""
    cache = make_cache(kind, model, 1, len(ids))
    logits = []
    for _ in range(0, len(ids), chunk):
        count = jnp.full(1, chunk, jnp.int32)
        cache, _, hidden = _prefill(model, model.parameters, cache, jnp.asarray([ids], jnp.int32), count, chunk)
        logits.append(model.logits(model.parameters, hidden))
    return jnp.concatenate(logits)


@partial(jax.jit, static_argnames=("model", "bound"), donate_argnames="cache")
def _prefill(
    model: Model,
    parameters: Any,
    cache: Any,
    table: Int32[Array, "rows width"],
    counts: Int32[Array, " rows"],
    bound: int,
) -> tuple[Any, Int32[Array, " rows"], Array]:
    cache, grant = kvjax.reserve(cache, counts, max_tokens=bound)
    tokens = table.at[grant.row, grant.position].get(mode="clip")
    hidden, cache = model.forward(parameters, cache, grant, tokens)
    logits = model.logits(parameters, hidden.at[grant.last].get(mode="clip"))
    return kvjax.commit(cache, grant.tokens), jnp.argmax(logits, -1).astype(jnp.int32), hidden


@partial(jax.jit, static_argnames=("model", "steps"))
def _decode(
    model: Model, parameters: Any, cache: Any, first: Int32[Array, " rows"], steps: int
) -> Int32[Array, "rows steps"]:
    def step(carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        cache, token = carry
        cache, grant = kvjax.reserve(cache, jnp.ones_like(token), max_tokens=len(token))
        hidden, cache = model.forward(parameters, cache, grant, token)
        token = jnp.argmax(model.logits(parameters, hidden), -1).astype(jnp.int32)
        return (kvjax.commit(cache, grant.tokens), token), token

    return lax.scan(step, (cache, first), length=steps)[1].T
