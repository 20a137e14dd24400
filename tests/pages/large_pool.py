"""Appends, page copies and gathers beyond 2^31 elements, in memory of 6 GB: python -m tests.pages.large_pool

The pool holds int8, so that elements and bytes pass 2^31 together.  Tokens are written on both sides of the boundary
and to the last page, in the last layer; pages are copied across it; every byte that should have changed is read back.
"""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.layout import canonical_layout
from kvjax.spec import GroupSpec, TensorSpec
from kvjax.storage import append_tokens, copy_pages, gather_pages

LAYERS, NUM_PAGES, HEADS, PAGE_SIZE, WIDTH = 2, 1 << 13, 8, 16, 640


def main() -> int:
    tensors = (TensorSpec("k", HEADS, WIDTH, "int8"), TensorSpec("v", HEADS, WIDTH, "int8"))
    layout = canonical_layout(GroupSpec("attention", tuple(range(LAYERS)), tensors), PAGE_SIZE).pools[0]
    shape = (LAYERS * NUM_PAGES, HEADS, PAGE_SIZE, layout.lanes)
    page_elements = HEADS * PAGE_SIZE * layout.lanes
    boundary = 2**31 // page_elements  # the first page that begins at or past 2^31, or holds it
    pool = jnp.zeros(shape, jnp.int8)
    print(f"{pool.size:,} elements; element 2^31 is in page {boundary} of {shape[0]}")

    page = jnp.asarray([boundary - 1, boundary, shape[0] - 1, shape[0]], jnp.int32)  # the last is out of range: dropped
    offset = jnp.asarray([15, 0, 15, 0], jnp.int32)
    k, v = (np.random.default_rng(seed).integers(1, 100, (4, HEADS, WIDTH)).astype(np.int8) for seed in (0, 1))
    append = jax.jit(lambda pool, k, v: append_tokens(pool, layout, page, offset, {"k": k, "v": v}), donate_argnums=0)
    pool = append(pool, k, v)
    wanted = np.concatenate([k, v], axis=-1)
    for place in range(3):
        np.testing.assert_array_equal(pool[page[place], :, offset[place]], wanted[place])
    # From below the boundary to above it and back, in both layers at once.
    source, target = jnp.asarray([5, NUM_PAGES - 1], jnp.int32), jnp.asarray([NUM_PAGES - 2, 6], jnp.int32)
    pool = jax.jit(partial(copy_pages, num_pages=NUM_PAGES), donate_argnums=0)(pool, source=source, target=target)
    np.testing.assert_array_equal(pool[NUM_PAGES + 6, :, 15], wanted[2])
    np.testing.assert_array_equal(pool[2 * NUM_PAGES - 1, :, 15], wanted[2])
    got = gather_pages(pool, jnp.asarray([[boundary, shape[0] - 1]], jnp.int32))
    np.testing.assert_array_equal(got[0, :, 0], wanted[1])
    np.testing.assert_array_equal(got[0, :, 2 * PAGE_SIZE - 1], wanted[2])
    changed = 4 * HEADS * layout.lanes
    total = sum(int(jnp.count_nonzero(pool[start : start + 1024])) for start in range(0, shape[0], 1024))
    assert total == changed, (total, changed)
    print(f"{changed:,} elements changed, all of them where they should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
