"""Paged attention in plain XLA: what CPU users run, with the arguments of the kernels and under their contract."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from kvjax.attention.tiled import tiled_attention
from kvjax.storage import gather_pages
from pallas_kernels.arguments import Attention, Scales, Tiles

BLOCK_TOKENS = 128
"""Positions read at a time, rounded to whole pages."""


def paged_attention(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    tiles: Tiles,
    page_offset: Int32[Array, ""],
    *,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None = None,
    scales: Scales | None = None,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """As `pallas_kernels.reference.paged_attention`, for any shape and dtype; memory does not grow with the context.

    Quantised keys and values are multiplied by their scales in float32.
    """
    _, kv_heads, page_size, _ = pool.shape
    key_dim, value_dim, width = q.shape[-1], attention.value_dim, pages.shape[1]
    count = max(1, BLOCK_TOKENS // page_size)

    def fetch(row: Int32[Array, " tiles"], index: Int32[Array, ""]) -> tuple[Array, Array]:
        logical = index * count + jnp.arange(count, dtype=jnp.int32)
        ids = pages.at[row[:, None], logical % width].get(mode="clip") + page_offset
        block = gather_pages(pool, ids)
        keys, values = block[..., :key_dim], block[..., key_dim : key_dim + value_dim]
        if scales is None:
            return keys, values
        page_shape = kv_heads, page_size
        return _scaled(keys, scales.key, ids, page_shape), _scaled(values, scales.value, ids, page_shape)

    return tiled_attention(
        q, tiles, fetch, block=count * page_size, kv_heads=kv_heads, attention=attention, sinks=sinks
    )


def _scaled(
    block: Shaped[Array, "tiles kv_heads positions dim"],
    scale: Float32[Array, "*shape"],
    ids: Int32[Array, "tiles count"],
    page_shape: tuple[int, int],
) -> Float32[Array, "tiles kv_heads positions dim"]:
    """What the codes in a block of pages stand for."""
    if scale.ndim == 2:
        kv_heads, page_size = page_shape
        of_pages = scale[:, : kv_heads * page_size].reshape(-1, kv_heads, page_size, 1)
        of_slots = gather_pages(of_pages, ids)
    else:
        of_slots = scale.reshape(-1, 1, 1)
    return block.astype(jnp.float32) * of_slots
