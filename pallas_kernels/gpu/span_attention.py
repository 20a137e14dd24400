"""Attention over spans for Hopper GPUs (Pallas Mosaic GPU): each row's tokens follow one another in memory.

Virtually contiguous rows as in vAttention (Prabhu et al., ASPLOS 2025): no page table, and one copy a block.
`attend_items` says how it is computed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles, check_arguments
from pallas_kernels.gpu.attend_items import TILE_LINES, attend_items
from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.span_stream import RECORD_BYTES, Spans
from pallas_kernels.hardware import GpuFacts
from pallas_kernels.tuned import AttentionShape

__all__ = ["BLOCK", "RECORD_BYTES", "TILE_LINES", "span_attention"]


def span_attention(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    memory: Shaped[Array, "rows span_tokens record"],
    tiles: Tiles,
    start: Int32[Array, ""],
    *,
    kv_heads: int,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None = None,
    scales: Scales | None = None,
    facts: GpuFacts,
    workers: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries over their rows' spans; `pallas_kernels.reference` defines it over pages.

    Args:
      q: as in `paged_attention`.
      memory: the spans of all rows, in the dtype of q, or quantised. A token's record holds whatever else there is, and
        from element `start` on, for each KV head, its key and then its value. Whole blocks of 64 tokens are read: what
        lies beyond a context in its last block may hold anything, but there must be memory.
      tiles: whose queries they are, and what they see.
      start: where this layer begins in a record; a multiple of RECORD_BYTES, counted from where its group begins in
        steps of kv_heads · (key_dim + value_dim).
      kv_heads: KV heads.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value.
      scales: what quantised keys and values are multiplied by: one number, or one a KV head.
      facts, workers, interpret: as in `paged_attention`.

    Cost: as `paged_attention`, but for the copies, which are one a block for the keys and one for the values, each of
    64 rows of key_dim or value_dim elements a record apart.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take; NotImplementedError for scales a
    token, which spans have no place for, and for a GPU that is not a Hopper.
    """
    if memory.ndim != 3 or memory.shape[1] % BLOCK:
        raise ValueError(f"{memory.shape=}; pass [rows, span_tokens, record], span_tokens a multiple of {BLOCK}")
    if memory.shape[2] * memory.dtype.itemsize % RECORD_BYTES:
        raise ValueError(
            f"{memory.shape=} of {memory.dtype}; pad a token's record to a multiple of {RECORD_BYTES} bytes"
        )
    rows, span_tokens, record = memory.shape
    lanes = q.shape[-1] + attention.value_dim
    if not 0 < kv_heads * lanes <= record:
        raise ValueError(f"{kv_heads=} of {lanes} lanes do not fit a record of {record} elements")
    if scales is not None and 2 in (scales.key.ndim, scales.value.ndim):
        raise NotImplementedError("spans hold no scales per token; pass one number, or one a KV head")
    # In everything that is checked, and that sizes depend on, a span is a row of pages of one block each.
    blocks: Any = jax.ShapeDtypeStruct((rows * span_tokens // BLOCK, kv_heads, BLOCK, lanes), memory.dtype)
    table: Any = jax.ShapeDtypeStruct((rows, span_tokens // BLOCK), jnp.int32)
    check_arguments(q, blocks, table, tiles, attention=attention, sinks=sinks, scales=scales, lane_multiple=1)
    return attend_items(
        q,
        Spans(memory, jnp.reshape(start, 1), lanes),
        tiles,
        shape=AttentionShape.of(q, blocks, attention, scales),
        most_blocks=span_tokens // BLOCK,
        attention=attention,
        sinks=sinks,
        scales=(scales.key, scales.value) if scales else (jnp.float32(1), jnp.float32(1)),
        facts=facts,
        workers=workers,
        interpret=interpret,
    )
