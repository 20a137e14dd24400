"""A cache whose backend is a chip writes and copies by that chip's kernels, and holds the same bits as one on XLA."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax import CacheSpec
from kvjax.extents import ExtentOptions
from kvjax.storage import dispatch
from pallas_kernels.hardware import H200, TPU_V6E
from tests.kernels import races

ROWS, LAYERS, HEADS, DIM = 4, 2, 2, 64
ON_TPU = pltpu.force_tpu_interpret_mode, pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
ON_GPU = plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
RESETS = {TPU_V6E: pltpu.reset_tpu_interpret_mode_state, H200: reset_gpu_interpret_mode_state}


def make_cache(backend, extents=None):
    spec = CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM)
    cache = kvjax.init(spec, rows=ROWS, num_pages=12, page_size=16, max_context=64, backend=backend, extents=extents)
    # Bits in every slot, so that one that is lost shows; the same whatever the backend.
    bits = np.random.default_rng(0).integers(0, 2**16, cache.pools[0]["kv"].shape, dtype=np.uint16)
    return replace(cache, pools=({"kv": jnp.asarray(bits).view(jnp.bfloat16)},))


@jax.jit
def serve(cache):
    """A prompt a row, forks that share a tail, a step in which each writes: copies on write, then appends."""
    random = np.random.default_rng(1)

    def step(cache, tokens, packed):
        k, v = (jnp.asarray(random.standard_normal((packed, HEADS, DIM)), jnp.bfloat16) for _ in range(2))
        cache, grant = kvjax.reserve(cache, jnp.asarray(tokens, jnp.int32), max_tokens=packed)
        for layer in range(LAYERS):
            cache = kvjax.write(cache, layer, grant, k=k + layer, v=v)
        return kvjax.commit(cache, grant.tokens), grant

    cache, _ = step(cache, [19, 0, 5, 0], 26)  # two places are padding
    cache, _ = kvjax.fork(cache, jnp.asarray([ROWS, 0, ROWS, 2], jnp.int32), max_pages=8)
    cache, grant = step(cache, [1, 3, 2, 1], 8)
    return cache, grant


@jax.jit
def attend_last(cache):
    """After prompts, forks and a step: what the last layer's attention gives to that step's tokens."""
    cache, grant = serve.__wrapped__(cache)
    q = jnp.asarray(np.random.default_rng(2).standard_normal((8, 2 * HEADS, DIM)), jnp.bfloat16)
    return kvjax.attend(cache, LAYERS - 1, grant, q)


@pytest.mark.parametrize("backend", [TPU_V6E, H200], ids=lambda facts: facts.name)
def test_kernels_leave_the_same_bits_as_xla(backend):
    jax.clear_caches()  # what is interpreted is decided when a kernel is traced
    expected, _ = serve(make_cache("xla"))

    force, params = ON_TPU if backend is TPU_V6E else ON_GPU
    cache = make_cache(backend)
    with races.raised(RESETS[backend]), force(params):
        got, grant = serve(cache)
        jax.block_until_ready(got)
    assert int(grant.copies) == 2 and np.asarray(grant.tokens).tolist() == [1, 3, 2, 1]
    for name in ("length", "reserved"):
        np.testing.assert_array_equal(getattr(got.table, name), getattr(expected.table, name))
    np.testing.assert_array_equal(
        np.asarray(got.pools[0]["kv"]).view(np.uint16), np.asarray(expected.pools[0]["kv"]).view(np.uint16)
    )


@pytest.mark.parametrize("backend", [TPU_V6E, H200], ids=lambda facts: facts.name)
def test_kernels_quantise_to_the_same_bits_as_xla(backend):
    spec = CacheSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="int8")
    k, v = np.random.default_rng(2).normal(size=(2, 5, HEADS, DIM)).astype(np.float32)
    scales = kvjax.attention.Scales(key=jnp.float32(0.01), value=jnp.array([0.02, 0.03], jnp.float32))

    @partial(jax.jit, static_argnums=0)
    def written(backend):
        cache = kvjax.init(spec, rows=2, num_pages=4, page_size=16, max_context=32, backend=backend)
        cache, grant = kvjax.reserve(cache, jnp.array([3, 2], jnp.int32), max_tokens=5)
        cache = kvjax.write(cache, 1, grant, scales=scales, k=jnp.asarray(k), v=jnp.asarray(v))
        return cache.pools[0]["kv"]

    jax.clear_caches()
    expected = np.asarray(written("xla"))
    force, params = ON_TPU if backend is TPU_V6E else ON_GPU
    with races.raised(RESETS[backend]), force(params):
        np.testing.assert_array_equal(written(backend), expected)
    assert abs(expected.astype(int)).max() == 128 and np.count_nonzero(expected) > 1000  # some saturate


@pytest.mark.parametrize("backend", [TPU_V6E, H200], ids=lambda facts: facts.name)
def test_a_cache_with_kernels_does_not_fall_back_to_xla(backend, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a cache with kernels called XLA's form")

    monkeypatch.setattr(dispatch.pools, "append_tokens", refuse)
    monkeypatch.setattr(dispatch.pools, "copy_pages", refuse)
    jax.make_jaxpr(serve.__wrapped__)(make_cache(backend))


@pytest.mark.parametrize("backend", [TPU_V6E, H200], ids=lambda facts: facts.name)
def test_runs_are_read_by_the_kernel_that_has_them(backend):
    """On TPU a cache on extents is read by runs; GPU kernels read its page table, and so does any cache without."""
    for extents in (None, ExtentOptions()):
        cache = jax.eval_shape(lambda extents=extents: make_cache(backend, extents))
        program = str(jax.make_jaxpr(attend_last)(cache))
        assert ("name=extent_attention" in program) == (extents is not None and backend is TPU_V6E)


def test_attention_by_runs_is_that_by_pages():
    """Rows in several runs, two of which share pages, in a layer past the first."""
    jax.clear_caches()
    expected = attend_last(make_cache("xla"))
    force, params = ON_TPU
    with races.raised(RESETS[TPU_V6E]), force(params):
        cache = make_cache(TPU_V6E, ExtentOptions(span=1))
        got = jax.block_until_ready(attend_last(cache))
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=2e-2)
