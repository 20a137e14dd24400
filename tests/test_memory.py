"""Where the bytes are: one buffer for the life of a cache, and shards that stay where they were put."""

from __future__ import annotations

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

SPEC = kvjax.CacheSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32")


def decode_step(cache: kvjax.KVCache, tokens: jax.Array) -> tuple[kvjax.KVCache, jax.Array]:
    rows = cache.rows
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=rows)
    k = jnp.ones((rows, 2, 8))
    for layer in range(2):
        cache = kvjax.write(cache, layer, grant, k=k, v=k)
        out = kvjax.attend(cache, layer, grant, jnp.ones((rows, 4, 8)))
    return kvjax.advance(kvjax.commit(cache, grant.tokens)), out


def test_the_pool_stays_at_its_address_and_nothing_recompiles():
    """100 donated steps with forks and releases: the same buffers, one compilation a function."""
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(decode_step, n=1), donate_argnums=0)
    fork, release = (
        jax.jit(chex.assert_max_traces(call, n=1), donate_argnums=0, static_argnames="max_pages")
        for call in (kvjax.fork, kvjax.release.dispatch(kvjax.KVCache))
    )
    cache = kvjax.init(SPEC, rows=4, num_pages=64, page_size=4, max_context=64)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)]
    refcounts = cache.table.groups[0].refcount.unsafe_buffer_pointer()
    random = np.random.default_rng(0)
    for _ in range(100):
        cache, _ = step(cache, jnp.asarray(random.integers(0, 2, 4), jnp.int32))
        cache, _ = fork(cache, jnp.asarray(random.integers(0, 5, 4), jnp.int32), max_pages=64)
        cache, _ = release(cache, jnp.asarray(random.random(4) < 0.1), max_pages=64)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)] == addresses
    assert cache.table.groups[0].refcount.unsafe_buffer_pointer() == refcounts
    assert kvjax.check_invariants(cache.table) == []


def test_a_donated_cache_is_gone():
    """The old cache cannot be used by mistake after it was donated."""
    cache = kvjax.init(SPEC, rows=4, num_pages=8, page_size=4, max_context=64)
    jax.jit(decode_step, donate_argnums=0)(cache, jnp.ones(4, jnp.int32))
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(cache.table.length)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, pytest
from jax.sharding import AxisType, PartitionSpec as P
import kvjax
from tests.test_memory import SPEC, decode_step
mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
build = lambda **more: kvjax.init(SPEC, rows=4, num_pages=512, page_size=4, max_context=64, **more)
split, whole = build(mesh=mesh), build()
pool = split.pools[0]["kv"]
assert [shard.data.shape for shard in pool.addressable_shards] == [(1024, 1, 4, 16)] * 2
step = jax.jit(decode_step, donate_argnums=0)
memory = step.lower(split, jnp.ones(4, jnp.int32)).compile().memory_analysis()
assert memory.alias_size_in_bytes >= pool.nbytes // 2 and memory.temp_size_in_bytes < pool.nbytes // 2, memory
addresses = [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards]
for _ in range(9):
    split, ours = step(split, jnp.ones(4, jnp.int32))
    whole, theirs = step(whole, jnp.ones(4, jnp.int32))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
pool = split.pools[0]["kv"]
assert [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards] == addresses
assert pool.sharding.spec == P(None, "heads"), pool.sharding
for arguments, message in (
    (dict(mesh=mesh, shardings=P("heads")), "other than heads"),
    (dict(shardings=P(None, "heads")), "needs a mesh"),
    (dict(mesh=jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))), "Auto"),
):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
odd = kvjax.CacheSpec.uniform(layers=1, kv_heads=3, head_dim=8, dtype="float32")
with pytest.raises(ValueError, match="3 heads"):
    kvjax.init(odd, rows=1, num_pages=4, max_context=8, mesh=mesh)
print("sharded cache is in place")
"""


def test_a_cache_spread_over_two_devices_is_in_place_and_equal():
    """Heads split over a mesh: same results, the same shard buffers after every step."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, "-c", SHARDED]
    done = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "in place" in done.stdout, done.stderr[-2000:]
