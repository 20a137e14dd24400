"""Decode over virtual memory: one array, no copy, and what the paged cache gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.virtual import VirtualSpace

ROWS, LAYERS, HEADS, GROUP, WIDTH = 3, 2, 2, 3, 16


def _step(cache: Any, tokens: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """All layers, traced by `lax.scan`; each layer's queries depend on the layer before, as a model's do."""
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=q.shape[1])

    def layer(carry: tuple[Any, Any], inputs: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
        cache, before = carry
        index, q, k, v = inputs
        cache = kvjax.write(cache, index, grant, k=k, v=v)
        out = kvjax.attend(cache, index, grant, q + before)
        return (cache, out), out

    start = (cache, jnp.zeros_like(q[0]))
    (cache, _), out = jax.lax.scan(layer, start, (jnp.arange(LAYERS), q, k, v))
    return kvjax.commit(cache, grant.tokens), out, grant.status


STEP = jax.jit(_step)
"""Compiled once for spaces of one layout: a space is not a part of the program."""


def _inputs(random: np.random.Generator, packed: int, dtype: str) -> list[jax.Array]:
    shapes = [(LAYERS, packed, heads, WIDTH) for heads in (HEADS * GROUP, HEADS, HEADS)]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        ("float32", [[140, 3, 130], [1, 1, 1], [1, 0, 1], [1, 1, 1], [100, 1, 20]]),
        ("bfloat16", [[1, 1, 1], [1, 0, 1]] * 10),
    ],
)
def test_the_same_attention_as_over_pages_to_the_last_bit(dtype, steps):
    """Prefill of rows of uneven lengths, then decode; every output equals the paged cache's, bit for bit."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype=dtype)
    space = VirtualSpace(spec, rows=ROWS, num_pages=256, max_context=300, page_group_bytes=4096)
    paged = kvjax.init(spec, rows=ROWS, num_pages=64, page_size=16, max_context=300)
    random = np.random.default_rng(0)
    for row in range(ROWS):
        assert space.admit(140) == row
    lengths = np.zeros(ROWS, np.int64)
    for tokens in steps:
        lengths = lengths + np.array(tokens)
        assert not space.step(np.where(np.array(tokens) > 0, lengths, 0)).any()
        inputs = _inputs(random, 280 if sum(tokens) > 3 else ROWS, dtype)
        count = np.array(tokens, np.int32)
        _, out, status = STEP(space.cache(), count, *inputs)
        paged, expected, _ = STEP(paged, count, *inputs)
        space.follow(out)
        space.commit()
        assert not np.asarray(status).any()
        np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    space.settle()
    assert space.check() == []
    space.close()


def test_attention_against_float64():
    """The same against plain float64 attention over the keys that were handed in: no code of ours in the oracle."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype="float32")
    space = VirtualSpace(spec, rows=ROWS, num_pages=256, max_context=300, page_group_bytes=4096)
    random = np.random.default_rng(1)
    assert space.admit(50) == 0
    lengths = np.array([50, 0, 0])
    space.step(lengths)
    q, k, v = _inputs(random, 280, "float32")
    _, out, _ = STEP(space.cache(), lengths.astype(np.int32), q, k, v)
    q, k, v, out = (np.asarray(each, np.float64)[:, :50] for each in (q, k, v, out))
    before = np.zeros((50, HEADS * GROUP, WIDTH))
    for layer in range(LAYERS):
        before = _attention(q[layer] + before, k[layer], v[layer])
        np.testing.assert_allclose(out[layer], before, atol=2e-5)
    space.close()


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    out = np.zeros(q.shape)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = (each[: token + 1, head // GROUP] for each in (k, v))
            logits = keys @ q[token, head] / np.sqrt(WIDTH)
            weights = np.exp(logits - logits.max())
            out[token, head] = weights @ values / weights.sum()
    return out


def test_decode_reads_the_reserved_addresses_and_copies_nothing():
    """The array the program takes begins at the reservation; the compiled step keeps no copy of it."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype="float32")
    space = VirtualSpace(spec, rows=ROWS, num_pages=16, max_context=100_000, page_group_bytes=4096)
    space.admit(1)
    space.step(np.array([1, 0, 0]))
    cache = space.cache()
    (memory,) = cache.memory.values()
    assert memory.unsafe_buffer_pointer() == space._rows.range.address
    assert memory.nbytes == space.figures().reserved_bytes > 100_000_000
    inputs = _inputs(np.random.default_rng(0), ROWS, "float32")
    compiled = jax.jit(_step).lower(cache, np.ones(ROWS, np.int32), *inputs).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1_000_000
    space.close()


def test_a_read_never_comes_before_the_write():
    """The same compiled step writes and reads one position, with another value each time, in all layers at once."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=1, head_dim=WIDTH, dtype="float32")
    space = VirtualSpace(spec, rows=1, num_pages=4, max_context=8, page_group_bytes=4096)
    space.admit(1)

    @jax.jit
    def step(cache: Any, value: Any) -> Any:
        cache, grant = kvjax.reserve(cache, jnp.ones(1, jnp.int32), max_tokens=1)
        one = jnp.ones((1, 1, WIDTH))
        for layer in range(LAYERS):
            cache = kvjax.write(cache, layer, grant, k=one, v=one * value)
        return jnp.stack([kvjax.attend(cache, layer, grant, one) for layer in range(LAYERS)])

    for value in range(100):
        space.step(np.array([1]))
        out = step(space.cache(), value)
        np.testing.assert_array_equal(np.asarray(out), value)
        space.follow(out)
        space.commit(np.array([0]))
    space.close()


def test_a_cache_of_an_earlier_request_writes_nothing():
    """A step kept from before a release stores nothing into the next request's memory, nor outside what is mapped."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype="float32")
    space = VirtualSpace(spec, rows=ROWS, num_pages=256, max_context=300, page_group_bytes=4096, lookahead=0)
    row = space.admit(1)
    lengths = np.where(np.arange(ROWS) == row, 1, 0)
    space.step(lengths)
    stale = space.cache()
    space.release(row)
    assert space.admit(1) == row
    space.step(lengths)
    inputs = _inputs(np.random.default_rng(0), ROWS, "float32")
    jax.block_until_ready(STEP(stale, lengths.astype(np.int32), *inputs))
    (memory,) = space.cache().memory.values()
    assert not np.any(np.asarray(memory)[row, :1])
    jax.block_until_ready(STEP(space.cache(), lengths.astype(np.int32), *inputs))
    assert np.all(np.asarray(memory)[row, :1, 0] != 0)
    space.close()


def test_what_is_not_resident_is_not_granted():
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=WIDTH, dtype="float32")
    space = VirtualSpace(spec, rows=ROWS, num_pages=256, max_context=300, page_group_bytes=4096, lookahead=0)
    space.admit(4)
    space.step(np.array([4, 0, 0]))
    resident = int(space.cache().resident[0])
    ask = np.array([resident + 1, 1, 0], np.int32)
    _, grant = kvjax.reserve(space.cache(), ask, max_tokens=300)
    assert grant.status.tolist() == [kvjax.Status.NOT_RESERVED, kvjax.Status.NOT_RESERVED, kvjax.Status.OK]
    _, grant = kvjax.reserve(space.cache(), np.array([resident, 0, 0], np.int32), max_tokens=300)
    assert grant.tokens.tolist() == [resident, 0, 0]
    space.close()
