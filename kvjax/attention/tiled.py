"""The running softmax in plain XLA: tiles of queries against blocks of keys, wherever those come from.

Online softmax over blocks of keys (FlashAttention, Dao et al. 2022, §3.1), read up to the longest context in the batch
and not up to the width of any table.  Where the keys come from is the caller's: a `fetch` of one block for all tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.arguments import Attention, Tiles

Fetch = Callable[
    [Int32[Array, " tiles"], Int32[Array, ""]],
    tuple[Float[Array, "tiles kv_heads block key_dim"], Float[Array, "tiles kv_heads block value_dim"]],
]
"""fetch(row of each tile, block index) → K and V of positions [index · block, (index + 1) · block) of those rows."""


def tiled_attention(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    tiles: Tiles,
    fetch: Fetch,
    *,
    block: int,
    kv_heads: int,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None = None,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries; zeros for places without a query and for queries that see nothing.

    Softmax and accumulation in float32, products in full precision, weights in the dtype of the values; the result has
    q's dtype.  What a tile does not see is never used: logits and values are both masked, so the memory may hold NaN.

    Cost: tiles × (blocks from the first to the last that any tile sees) products; temporaries O(tiles · block), not
    O(context).
    """
    number, tokens, q_heads, _ = q.shape
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} must be a multiple of {kv_heads=}; a group of queries shares one KV head")
    group = q_heads // kv_heads
    grouped = q.reshape(number, tokens, kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(number, kv_heads, group * tokens, -1)
    start, end = seen(tiles, tokens, attention)
    per_line = (jnp.tile(start, (1, group)), jnp.tile(end, (1, group)))  # [tiles, group · tokens]
    per_tile = (start.min(axis=1), end.max(axis=1))

    def step(turn: Int32[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, out = carry
        index = jnp.where(turn < kept_blocks, turn, turn - kept_blocks + first_block)
        k, v = fetch(tiles.row, index)
        logits = _product("nkqd,nkbd->nkqb", grouped, k) * attention.scale
        if attention.soft_cap is not None:
            logits = attention.soft_cap * jnp.tanh(logits / attention.soft_cap)
        visible = within_block(*per_line, index, block, attention.kept)
        logits = jnp.where(visible[:, None], logits, -jnp.inf)
        new_highest = jnp.maximum(highest, logits.max(-1))
        # A query that has seen nothing yet keeps −∞; subtracting it from itself would give NaN.
        base = jnp.where(jnp.isneginf(new_highest), 0, new_highest)
        weight = jnp.exp(logits - base[..., None])
        decay = jnp.exp(highest - base)
        v = seen_values(v, within_block(*per_tile, index, block, attention.kept))
        out = out * decay[..., None] + _product("nkqb,nkbd->nkqd", weight.astype(v.dtype), v)
        return new_highest, total * decay + weight.sum(-1), out

    shape = (number, kv_heads, group * tokens)
    nothing = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, attention.value_dim)))
    kept_blocks = -(-attention.kept // block)
    first_block = jnp.maximum(jnp.min(per_tile[0], initial=2**31 - 1) // block, kept_blocks)
    last_block = -(-jnp.max(per_tile[1], initial=0) // block)
    turns = jnp.minimum(last_block, kept_blocks + jnp.maximum(last_block - first_block, 0))
    highest, total, out = lax.fori_loop(0, turns, step, nothing)
    if sinks is not None:
        total += jnp.exp(jnp.repeat(sinks.reshape(kv_heads, group), tokens, axis=1) - highest)
    # Lines that saw nothing have a total of 0, or of ∞ where there is a sink: their output is 0 all the same.
    out = out / jnp.where(total == 0, 1, total)[..., None]
    out = out.reshape(number, kv_heads, group, tokens, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(number, tokens, q_heads, -1).astype(q.dtype)


def seen(
    tiles: Tiles, tokens: int, attention: Attention
) -> tuple[Int32[Array, "tiles tokens"], Int32[Array, "tiles tokens"]]:
    """The positions [start, end) each place sees, beside those always kept; start = 2³¹ − 1 and end = 0 for none."""
    place = jnp.arange(tokens, dtype=jnp.int32)
    queries, context = tiles.queries[:, None], tiles.context[:, None]
    end = jnp.where(place < queries, jnp.maximum(context - queries + 1 + place, 0), 0)
    start = jnp.zeros_like(end) if attention.window is None else jnp.maximum(end - attention.window, 0)
    return jnp.where(end > 0, start, 2**31 - 1), end


def within_block(
    start: Int32[Array, "*shape"], end: Int32[Array, "*shape"], index: Int32[Array, ""], block: int, kept: int = 0
) -> Bool[Array, "*shape {block}"]:
    """Which positions of block `index` stand in [start, end) or before `kept` and `end`.

    Counted from the block's beginning: the last block may reach past 2³¹ − 1, where a position would turn negative.
    """
    offset = jnp.arange(block, dtype=jnp.int32)
    begin = index * block
    return (offset < (end - begin)[..., None]) & ((offset >= (start - begin)[..., None]) | (offset < kept - begin))


def seen_values(
    v: Float[Array, "tiles kv_heads block value_dim"], seen: Bool[Array, "tiles block"]
) -> Float[Array, "tiles kv_heads block value_dim"]:
    """Values with zeros where no query of the tile sees them: a weight of zero does not undo a NaN."""
    return jnp.where(seen[:, None, :, None], v, 0)


def _product(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
