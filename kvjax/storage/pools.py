"""The arrays that hold cached bytes, and the three things done to them: append, copy pages, gather.

A pool is `[layers · pages, heads, page_size, lanes]`, flat over layers so that a layer is an offset that may be traced:
`[layers, pages, …]` indexed by a traced layer inside `lax.scan` is copied whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped

from kvjax.layout import PoolLayout
from kvjax.packing import pack_rows
from pallas_kernels.quantise import stored_tokens

Pool = Shaped[Array, "layer_pages heads page_size lanes"]

NO_SCALES: Mapping[str, Float32[Array, "*_"]] = MappingProxyType({})


def append_tokens(
    pool: Pool,
    layout: PoolLayout,
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: Mapping[str, Shaped[Array, "packed _ _"]],
    scales: Mapping[str, Float32[Array, "*_"]] = NO_SCALES,
) -> Pool:
    """Writes one token each into slot `offset` of page `page` (layer offset included); pages out of range are dropped.

    Tensors are cast to the pool's dtype; one that has a scale is quantised by it (`pallas_kernels.quantise`).
    In place when the pool is donated.  Writes packed · heads · lanes elements and reads none.
    """
    tokens, _ = stored_tokens(*side_by_side(layout, tensors, scales), pool)
    return pool.at[page, :, offset].set(tokens, mode="drop")


def side_by_side(
    layout: PoolLayout,
    tensors: Mapping[str, Shaped[Array, "packed _ _"]],
    scales: Mapping[str, Float32[Array, "*_"]],
) -> tuple[tuple[Shaped[Array, "packed _ _"], ...], tuple[Float32[Array, "*_"], ...] | None]:
    """A pool's tensors in the order of its lanes, and their scales, or None if they have none."""
    names = [name for name, _, _ in layout.slices]
    own_scales = tuple(scales[name] for name in names if name in scales)
    return tuple(tensors[name] for name in names), own_scales or None


def copy_pages(pool: Pool, num_pages: int, source: Int32[Array, " rows"], target: Int32[Array, " rows"]) -> Pool:
    """Copies whole pages, in all layers, from `source` to `target`; `num_pages` in either means none.

    No page is both a source and a target, and no target stands twice.  A loop over the copies there are: nothing is
    moved when nothing is shared.  In place when the pool is donated; temporaries are one page of one layer.
    """
    wanted = (source < num_pages) & (target < num_pages)
    place, _ = pack_rows(wanted.astype(jnp.int32), source.shape[0])
    layers = pool.shape[0] // num_pages

    def copy_one(index: Int32[Array, ""], pool: Pool) -> Pool:
        # Flat ids, not a view by layers: the compiler copies a pool that is reshaped on its way into a loop.
        row, layer = place[index // layers], index % layers * num_pages
        page = lax.dynamic_slice_in_dim(pool, layer + source[row], 1)
        return lax.dynamic_update_slice_in_dim(pool, page, layer + target[row], 0)

    return lax.fori_loop(0, jnp.sum(wanted, dtype=jnp.int32) * layers, copy_one, pool)


def gather_pages(pool: Pool, pages: Int32[Array, "tiles count"]) -> Shaped[Array, "tiles heads positions lanes"]:
    """The given pages (layer offset included) of each tile, joined along positions.

    Ids out of range are clipped: what they bring stands for positions that the caller masks.
    """
    got = pool.at[pages].get(mode="clip")
    tiles, count, heads, page_size, lanes = got.shape
    return got.transpose(0, 2, 1, 3, 4).reshape(tiles, heads, count * page_size, lanes)
