"""Attention in plain XLA: what CPU users run, and prefill on every backend for now.

Online softmax over blocks of keys (FlashAttention, Dao et al. 2022, §3.1), read up to the longest context in the batch
and not up to the width of any table.  Where the keys come from is the caller's: a `fetch` of one block for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from kvjax.attention.tiles import make_tiles
from kvjax.grant import Grant

MAX_TILE = 32
"""Most queries a tile: a row's keys are read once for this many."""

Fetch = Callable[
    [Int32[Array, " tiles"], Int32[Array, ""]],
    tuple[Float[Array, "tiles kv_heads block key_dim"], Float[Array, "tiles kv_heads block value_dim"]],
]
"""fetch(row of each tile, block index) → K and V of positions [index · block, (index + 1) · block) of those rows."""


def tiled_attention(
    q: Float[Array, "packed q_heads key_dim"],
    grant: Grant,
    fetch: Fetch,
    *,
    block: int,
    kv_heads: int,
    value_dim: int,
    scale: float,
) -> Float[Array, "packed q_heads value_dim"]:
    """Causal attention of every granted token over its row's keys; zeros for padding tokens.

    Softmax and accumulation in float32, products in full precision, weights in the dtype of the values; the result has
    q's dtype.  What lies past a row's context is never used: logits and values are both masked, so the memory may hold
    NaN.

    Cost: tiles × ceil(longest context / block) block products; temporaries O(tiles · block), not O(context).
    """
    tiles = make_tiles(grant, tile_size(grant.packed, grant.rows))
    number, size = tiles.source.shape
    q_heads = q.shape[1]
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}; a group of queries shares one KV head")
    group = q_heads // kv_heads
    queries = tiles.split(q).reshape(number, size, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(number, kv_heads, group * size, -1)
    visible = jnp.tile(tiles.visible, (1, group))[:, None, :]  # [tiles, 1, group · size]

    def step(index: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = carry
        k, v = fetch(tiles.row, index)
        logits = _product("nkqd,nkbd->nkqb", queries, k) * scale
        logits = jnp.where(within_block(visible, index, block), logits, -jnp.inf)
        new_highest = jnp.maximum(highest, logits.max(-1))
        # A query that has seen nothing yet keeps −∞; subtracting it from itself would give NaN.
        base = jnp.where(jnp.isneginf(new_highest), 0, new_highest)
        weight = jnp.exp(logits - base[..., None])
        decay = jnp.exp(highest - base)
        v = written_values(v, within_block(tiles.context, index, block))
        out = out * decay[..., None] + _product("nkqb,nkbd->nkqd", weight.astype(v.dtype), v)
        return new_highest, total * decay + weight.sum(-1), out

    shape = (number, kv_heads, group * size)
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, value_dim)))
    blocks = -(-jnp.max(tiles.context, initial=0) // block)
    _, total, out = lax.fori_loop(0, blocks, step, start)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    out = out.reshape(number, kv_heads, group, size, value_dim).transpose(0, 3, 1, 2, 4)
    return tiles.join(out.reshape(number, size, q_heads, value_dim).astype(q.dtype))


def tile_size(packed: int, rows: int) -> int:
    """Queries a tile: a power of two near the tokens a row brings, so that few places of a tile stay empty."""
    return 1 if packed <= rows else min(MAX_TILE, 1 << (packed // rows).bit_length() - 1)


def within_block(end: Int32[Array, "*shape"], index: Int32[Array, ""], block: int) -> Bool[Array, "*shape {block}"]:
    """Which positions of block `index` stand before `end`.

    Counted from the block's beginning: the last block may reach past 2³¹ − 1, where a position would turn negative.
    """
    return jnp.arange(block, dtype=jnp.int32) < (end - index * block)[..., None]


def written_values(
    v: Float[Array, "tiles kv_heads block value_dim"], written: Bool[Array, "tiles block"]
) -> Float[Array, "tiles kv_heads block value_dim"]:
    """Values with zeros past the context: a weight of zero does not undo a NaN."""
    return jnp.where(written[:, None, :, None], v, 0)


def _product(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
