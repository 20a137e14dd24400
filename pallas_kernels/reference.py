"""Paged attention in plain jax.numpy: the contract that every paged attention kernel is held to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles


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
    """Causal attention of tiles of queries over the pages of their rows. Decode is a tile of one token.

    Args:
      q: bfloat16, float16 or float32. Query head h reads KV head h // (q_heads / kv_heads). Places without a query may
        hold anything.
      pool: the pages of all layers, in the dtype of q, or quantised: float8_e4m3fn, float8_e5m2, int8. A slot holds
        its key in lanes [0, key_dim), its value in lanes [key_dim, key_dim + value_dim) and anything at all beyond.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries that no query of a row sees,
        past its context or before its window, may hold any number.
      tiles: whose queries they are, and what they see.
      page_offset: layer × pages per layer.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value (gpt-oss).
      scales: what quantised keys and values are multiplied by.

    Computes in float32 throughout and returns the dtype of q. Slots that a query does not see do not reach its result,
    whatever they hold. Cost: tiles × width × page_size positions, whatever the contexts are.
    """
    number, tokens, q_heads, key_dim = q.shape
    _, kv_heads, page_size, _ = pool.shape
    positions = pages.shape[1] * page_size
    visible = visible_positions(tiles, tokens, positions, attention)
    touched = visible.any(axis=1)  # [tiles, positions]

    table = pages.at[tiles.row].get(mode="clip")
    of_page = touched.reshape(number, -1, page_size).any(axis=2)
    table = jnp.where(of_page, table + page_offset, 0)

    def slots(pool: Shaped[Array, "total_pages kv_heads page_size _"]) -> Float32[Array, "tiles kv_heads positions _"]:
        got = jnp.swapaxes(pool[table].astype(jnp.float32), 1, 2).reshape(number, kv_heads, positions, -1)
        return jnp.where(touched[:, None, :, None], got, 0)

    stored = slots(pool)
    keys, values = stored[..., :key_dim], stored[..., key_dim : key_dim + attention.value_dim]
    if scales is not None:
        keys *= _per_slot(scales.key, pool, slots)
        values *= _per_slot(scales.value, pool, slots)

    grouped = q.astype(jnp.float32).reshape(number, tokens, kv_heads, -1, key_dim)
    logits = attention.scale * jnp.einsum("nthgd,nhkd->nhgtk", grouped, keys, precision=jax.lax.Precision.HIGHEST)
    if attention.soft_cap is not None:
        logits = attention.soft_cap * jnp.tanh(logits / attention.soft_cap)
    seen = visible[:, None, None]
    if sinks is None:
        weights = jax.nn.softmax(logits, axis=-1, where=seen)
    else:
        sink = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
        weights = jax.nn.softmax(logits, axis=-1, where=jnp.pad(seen, [(0, 0)] * 4 + [(0, 1)], constant_values=True))
        weights = weights[..., :-1]
    out = jnp.einsum("nhgtk,nhkd->nthgd", weights, values, precision=jax.lax.Precision.HIGHEST)
    out = jnp.where(visible.any(axis=2)[:, :, None, None], out.reshape(number, tokens, q_heads, -1), 0)
    return out.astype(q.dtype)


def visible_positions(
    tiles: Tiles, tokens: int, positions: int, attention: Attention
) -> Bool[Array, "tiles tokens positions"]:
    """Which positions each place of each tile sees."""
    place = jnp.arange(tokens, dtype=jnp.int32)
    end = tiles.context[:, None] - tiles.queries[:, None] + 1 + place
    end = jnp.where(place < tiles.queries[:, None], end, 0)[..., None]
    position = jnp.arange(positions, dtype=jnp.int32)
    visible = position < end
    if attention.window is not None:
        visible &= (position >= end - attention.window) | (position < attention.kept)
    return visible


def _per_slot(scale: Float32[Array, "*shape"], pool: Array, slots) -> Float32[Array, "*_"]:
    """A scale in a shape that multiplies `[tiles, kv_heads, positions, dim]`."""
    if scale.ndim < 2:
        return scale.reshape(-1, 1, 1)
    total_pages, kv_heads, page_size, _ = pool.shape
    return slots(scale[:, : kv_heads * page_size].reshape(total_pages, kv_heads, page_size, 1))
