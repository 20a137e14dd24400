"""Paged decode attention in plain jax.numpy: the contract that every paged decode kernel is held to."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def paged_decode(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    page_offset: Int32[Array, ""],
    *,
    value_dim: int,
    scale: float,
) -> Float[Array, "queries q_heads value_dim"]:
    """Attention of one token a query over the first `context` positions of its row.

    Args:
      q: bfloat16 or float32. Query head h reads KV head h // (q_heads / kv_heads).
      pool: the pages of all layers, in the dtype of q. A slot holds its key in lanes [0, key_dim), its value in lanes
        [key_dim, key_dim + value_dim) and anything at all beyond.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries at or past
        ceil(context / page_size) may hold any number.
      row: the row each query belongs to; queries may share one. Out of range for a padding query, whose context is 0.
      context: how many positions each query sees. 0 gives exactly zero.
      page_offset: layer × pages per layer.
      value_dim: lanes of a value.
      scale: what logits are multiplied by.

    Computes in float32 throughout and returns the dtype of q. Slots at or past a query's context do not reach the
    result, whatever they hold. Cost: queries × width × page_size positions, whatever the contexts are.
    """
    queries, q_heads, key_dim = q.shape
    _, kv_heads, page_size, _ = pool.shape
    positions = pages.shape[1] * page_size
    visible = jnp.arange(positions) < context[:, None]

    table = pages.at[row].get(mode="clip")
    table = jnp.where(visible[:, ::page_size], table + page_offset, 0)
    slots = pool[table].astype(jnp.float32)  # [queries, width, kv_heads, page_size, lanes]
    slots = jnp.swapaxes(slots, 1, 2).reshape(queries, kv_heads, positions, -1)
    slots = jnp.where(visible[:, None, :, None], slots, 0)
    keys = slots[..., :key_dim]
    values = slots[..., key_dim : key_dim + value_dim]

    grouped = q.astype(jnp.float32).reshape(queries, kv_heads, q_heads // kv_heads, key_dim)
    logits = scale * jnp.einsum("qhgd,qhkd->qhgk", grouped, keys, precision=jax.lax.Precision.HIGHEST)
    weights = jax.nn.softmax(logits, axis=-1, where=visible[:, None, None, :])
    out = jnp.einsum("qhgk,qhkd->qhgd", weights, values, precision=jax.lax.Precision.HIGHEST)
    return out.reshape(queries, q_heads, value_dim).astype(q.dtype)
