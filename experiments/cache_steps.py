"""Decode steps on a paged cache, on extents, on a virtual and a contiguous one: the same tokens and arithmetic.

A step appends one token to every row and attends to all of it, layer after layer, without a model around.  Time is that
of the whole step as the host sees it, for a virtual space with `step` and `commit`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.virtual import VirtualSpace

LAYERS, HEADS, QUERY_HEADS, WIDTH = 4, 2, 8, 64
SPEC = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype="float32")
"""4 KiB a token."""

PAGE_TOKENS = 16
WARM_UP = 4
"""Steps before the measured ones."""


@dataclass(frozen=True)
class Shape:
    """Rows that decode, and the context each begins with."""

    rows: int
    context: int


class Paged:
    """`kvjax.init` or `kvjax.init_contiguous`: the cache is donated to every step."""

    def __init__(self, cache: Any, shape: Shape) -> None:
        self._count = jnp.ones(shape.rows, jnp.int32)
        grow = jax.jit(partial(_grow, max_tokens=shape.rows * shape.context), donate_argnums=0)
        self._cache = grow(cache, self._count * shape.context)
        self._run = jax.jit(_decode, donate_argnums=0)

    def step(self) -> jax.Array:
        self._cache, out = self._run(self._cache, self._count)
        return out

    def figures(self) -> dict[str, Any]:
        return {}


class Virtual:
    """A virtual space."""

    def __init__(self, shape: Shape, page_group_bytes: int, tokens: int) -> None:
        self._space = VirtualSpace(
            SPEC,
            rows=shape.rows,
            num_pages=shape.rows * -(-tokens * SPEC.bytes_per_token // page_group_bytes),
            max_context=tokens,
            page_group_bytes=page_group_bytes,
        )
        self._count = jnp.ones(shape.rows, jnp.int32)
        for _ in range(shape.rows):
            self._space.admit(shape.context)
        self._space.step(np.full(shape.rows, shape.context))
        self._space.follow(self._count)
        self._space.commit()
        self._run = jax.jit(lambda cache, count: _decode(cache, count)[1])
        self._before: Any = None

    def step(self) -> jax.Array:
        self._space.step(self._space.length + 1)
        out = self._run(self._space.cache(), self._count)
        self._space.follow(out)
        self._space.commit()
        return out

    def begin(self) -> None:
        """Counts from here on."""
        self._space.settle()
        self._before = self._space.figures().counters

    def figures(self) -> dict[str, Any]:
        self._space.settle()
        now, before = self._space.figures().counters, self._before
        seconds, ahead = now.map_seconds - before.map_seconds, now.ahead_seconds - before.ahead_seconds
        return {
            "map_calls": now.map_calls - before.map_calls,
            "map_seconds": seconds,
            "overlapped": ahead / seconds if seconds else 1.0,
            "stalls": now.stalls - before.stalls,
        }


def measure(shape: Shape, page_groups: list[int], steps: int, progress: Callable[[], object]) -> list[dict[str, Any]]:
    """One record a cache: the caches take turns, step by step."""
    tokens = shape.context + WARM_UP + steps
    pages = shape.rows * -(-tokens // PAGE_TOKENS)
    contiguous = kvjax.init_contiguous(SPEC, rows=shape.rows, max_context=tokens)
    of_pages = partial(kvjax.init, SPEC, rows=shape.rows, num_pages=pages, page_size=PAGE_TOKENS, max_context=tokens)
    subjects: dict[str, Paged | Virtual] = {
        "contiguous": Paged(contiguous, shape),
        "paged": Paged(of_pages(), shape),
        "extents": Paged(of_pages(extents=kvjax.extents.ExtentOptions()), shape),
    }
    subjects |= {name_of(size): Virtual(shape, size, tokens) for size in page_groups}
    outputs = {}
    for name, subject in subjects.items():
        for _ in range(WARM_UP):
            outputs[name] = np.asarray(subject.step())
        progress()
    for name, out in outputs.items():
        np.testing.assert_allclose(out, outputs["contiguous"], atol=1e-5, err_msg=name)
    for subject in subjects.values():
        if isinstance(subject, Virtual):
            subject.begin()
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(steps):
        for name, subject in subjects.items():
            start = time.perf_counter()
            subject.step().block_until_ready()
            times[name].append(1000 * (time.perf_counter() - start))
    records = []
    for name, subject in subjects.items():
        low, median, high = np.quantile(times[name], [0.1, 0.5, 0.9]).tolist()
        against = median / statistics.median(times["contiguous"])
        spread = {"milliseconds": median, "low": low, "high": high, "against_contiguous": against}
        records.append({"rows": shape.rows, "context": shape.context, "cache": name} | spread | subject.figures())
    return records


def name_of(page_group_bytes: int) -> str:
    return f"virtual {page_group_bytes >> 10} KiB"


def _grow(cache: Any, count: jax.Array, *, max_tokens: int) -> Any:
    cache, grant = kvjax.reserve(cache, count, max_tokens=max_tokens)
    return kvjax.commit(cache, grant.tokens)


def _decode(cache: Any, count: jax.Array) -> tuple[Any, jax.Array]:
    rows = count.shape[0]
    cache, grant = kvjax.reserve(cache, count, max_tokens=rows)
    q = jnp.sin(jnp.arange(rows * QUERY_HEADS * WIDTH, dtype=jnp.float32)).reshape(rows, QUERY_HEADS, WIDTH)
    for layer in range(LAYERS):
        cache = kvjax.write(cache, layer, grant, k=q[:, :HEADS], v=q[:, -HEADS:])
        q = q + kvjax.attend(cache, layer, grant, q)
    cache, q = kvjax.after(cache, q)
    return kvjax.commit(cache, grant.tokens), q
