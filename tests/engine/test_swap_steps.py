"""Saving and restoring moves every byte of every tensor, layer and group, touches no other page, and is in place."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import PagedBacking
from kvjax.engine.swap_steps import restore_pages, save_pages, unpin_pages
from kvjax.pages import check_invariants
from kvjax.spec import GroupSpec, TensorSpec

PAGE, ROWS = 4, 3
SPEC = kvjax.CacheSpec(
    (
        GroupSpec("attention", (0, 2), (TensorSpec("k", 2, 8, "float32"), TensorSpec("v", 2, 8, "float32"))),
        GroupSpec("indexed", (1,), (TensorSpec("latent", 1, 16, "bfloat16"), TensorSpec("index", 1, 4, "int8"))),
    )
)


def backing(num_pages=8):
    return PagedBacking(num_pages, PAGE, 32)


def full_cache():
    """Row 0 has 10 tokens, row 1 has 5; every byte of the pools is random."""
    cache = backing().init(SPEC, ROWS)
    draw = np.random.default_rng(0)
    pools = jax.tree.map(lambda pool: jnp.asarray(draw.integers(-99, 99, pool.shape), pool.dtype), cache.pools)
    cache, grant = kvjax.reserve(replace(cache, pools=pools), jnp.array([10, 5, 0]), max_tokens=16)
    return kvjax.commit(cache, grant.tokens)


def rows_bytes(cache, row, number):
    """What the first `number` pages of a row hold, read plainly."""
    found = []
    for pools, group, spec in zip(cache.pools, cache.table.groups, SPEC.groups, strict=True):
        ids = np.asarray(group.pages)[row, :number]
        for pool in pools.values():
            layers = np.asarray(pool).reshape(len(spec.layers), group.num_pages, *pool.shape[1:])
            found.append(layers[:, ids])
    return found


def entries(row, number, bucket=8):
    """(rows, logical pages) of a row's first pages, padded."""
    logical = jnp.arange(bucket, dtype=jnp.int32)
    return jnp.where(logical < number, row, ROWS).astype(jnp.int32), jnp.where(logical < number, logical, 0)


def test_pages_come_back_whole_and_elsewhere():
    before = full_cache()
    saved = rows_bytes(before, 0, 3)
    cache, ids, images = save_pages(before, *entries(0, 3))
    cache, _ = kvjax.release(cache, jnp.array([True, False, False]), max_pages=8)
    cache, _, free = unpin_pages(backing(), cache, ids)
    assert free == 6 and check_invariants(cache.table) == []
    # Somebody else takes pages first and overwrites them.
    cache, grant = kvjax.reserve(cache, jnp.array([0, 0, 8]), max_tokens=8)
    cache = kvjax.commit(cache, grant.tokens)
    cache = replace(cache, pools=jax.tree.map(lambda pool: pool.at[:].set(7), cache.pools))
    neighbours = rows_bytes(cache, 1, 2) + rows_bytes(cache, 2, 2)
    tokens = jnp.array([10, 0, 0])
    cache, status, free = restore_pages(backing(), cache, tokens, *entries(0, 3), images)
    assert (status == 0).all() and free == 1 and cache.table.length.tolist() == [10, 5, 8]
    assert check_invariants(cache.table) == []
    assert not (np.asarray(cache.table.groups[0].pages)[0, :3] == np.asarray(before.table.groups[0].pages)[0, :3]).all()
    for found, wanted in zip(rows_bytes(cache, 0, 3), saved, strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(rows_bytes(cache, 1, 2) + rows_bytes(cache, 2, 2), neighbours, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_padding_brings_no_other_page_along():
    _, _, images = save_pages(full_cache(), *entries(0, 3))
    assert all(not np.asarray(image[:, 3:]).any() for image in jax.tree.leaves(images))


def compiled(step, num_pages, *, donate=True):
    """A step's memory for pools of `num_pages` pages, and the bytes of its cache."""
    cache = jax.eval_shape(lambda: backing(num_pages).init(SPEC, ROWS))
    row, logical = entries(0, 3)
    _, ids, images = jax.eval_shape(save_pages, cache, row, logical)
    function, arguments = {
        "save": (save_pages, (row, logical)),
        "unpin": (partial(unpin_pages, backing(num_pages)), (ids,)),
        "restore": (partial(restore_pages, backing(num_pages)), (np.zeros(ROWS, np.int32), row, logical, images)),
    }[step]
    lowered = jax.jit(function, donate_argnames="cache" if donate else ()).lower(cache, *arguments)
    return lowered.compile().memory_analysis(), sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("step", ["save", "unpin", "restore"])
def test_each_step_is_in_place(step):
    small, small_cache = compiled(step, 1 << 10)
    large, large_cache = compiled(step, 1 << 14)
    assert small.alias_size_in_bytes >= small_cache and large.alias_size_in_bytes >= large_cache
    assert large.temp_size_in_bytes - small.temp_size_in_bytes <= 4096 < large_cache - small_cache


def test_a_step_that_is_not_in_place_is_noticed():
    memory, cache = compiled("restore", 1 << 10, donate=False)
    assert memory.alias_size_in_bytes < cache
