"""A virtual space's memory read by the GPU kernel, interpreted, against plain XLA on the same memory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

import kvjax
from kvjax.virtual import VirtualSpace
from pallas_kernels.gpu import span_attention
from pallas_kernels.hardware import H200, TPU_V6E
from tests.kernels import races

ROWS, HEADS, DIM, PACKED = 3, 2, 64, 160
LENGTHS = np.array([150, 0, 7])
SPEC = kvjax.CacheSpec.uniform(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16")


@pytest.fixture
def space():
    """Two rows with other numbers in every slot, in the second layer as in the first, and one without a token."""
    space = VirtualSpace(SPEC, rows=ROWS, num_pages=64, max_context=256, page_group_bytes=4096)
    for row in (0, 2):
        space.admit(int(LENGTHS[row]), row=row)
    assert not space.step(LENGTHS).any()

    @jax.jit
    def write(cache):
        cache, grant = kvjax.reserve(cache, jnp.asarray(LENGTHS), max_tokens=PACKED)
        for layer in range(2):
            k, v = jax.random.normal(jax.random.key(layer), (2, PACKED, HEADS, DIM))
            cache = kvjax.write(cache, layer, grant, k=k, v=v)
        return cache.order

    space.follow(write(space.cache()))
    space.commit()
    assert not space.step(LENGTHS + (LENGTHS > 0)).any()
    yield space
    space.follow(())
    space.close()


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel in its interpreter, which looks for races."""
    params = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    kernel = partial(span_attention.span_attention, workers=3, interpret=params)
    monkeypatch.setattr(span_attention, "span_attention", kernel)


def attend(cache):
    """One more token a row, of which the keys are whatever is there."""
    cache, grant = kvjax.reserve(cache, jnp.asarray((LENGTHS > 0).astype(np.int32)), max_tokens=8)
    q = jax.random.normal(jax.random.key(2), (8, 3 * HEADS, DIM), jnp.bfloat16)
    return kvjax.attend(cache, 1, grant, q)


def test_the_kernel_reads_the_spans_that_xla_reads(space, interpreted):
    expected = jax.jit(attend)(space.cache())
    with races.raised(reset_gpu_interpret_mode_state):
        got = jax.block_until_ready(jax.jit(attend)(replace(space.cache(), backend=H200)))
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=2e-2)
    assert np.any(np.asarray(got[:2]) != 0) and not np.any(np.asarray(got[2:]))


def test_reads_wait_for_the_stores(space, interpreted):
    """Rows to read are computed from `order`: with 2 in place of 0, the first row reads what the third holds."""

    @jax.jit
    def moved(order):
        return attend(replace(space.cache(), backend=H200, order=order))

    first, third = (np.asarray(moved(jnp.int32(order)), np.float32)[0] for order in (0, 2))
    assert np.isfinite(first).all() and np.any(first != third)


def test_a_tpu_is_refused_by_name(space):
    with pytest.raises(NotImplementedError, match=r"v6e shows its user no virtual memory; use kvjax.init\(extents"):
        attend(replace(space.cache(), backend=TPU_V6E))
