"""Paged decode attention for TPU (Pallas Mosaic TPU): one query token each, keys and values in pages.

A flash-decode: the grid runs over queries, and each query reads its context block by block under a running softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135), from pages as in Kwon et al. 2023
(arXiv:2309.06180). `page_stream` brings the blocks; this file computes.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.arguments import check_decode_arguments
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.page_stream import SLICE, PageStream, Ref, Scalar

LANES = 128
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked logit: finite, for −inf − (−inf) would be NaN
RING_BLOCKS = 2
COPY_SECONDS = 1e-6  # a block is what HBM delivers in about the latency of a copy, so that latency is hidden
MAX_BLOCK_TOKENS = 1024


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
    facts: TpuFacts,
    pages_per_block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "queries q_heads value_dim"]:
    """Attention of one token a query over the first `context` positions of its row.

    Args:
      q: bfloat16 or float32; heads of 64 or 128. Query head h reads KV head h // (q_heads / kv_heads).
      pool: the pages of all layers, in the dtype of q; pages of 16, 32, 64 or 128 tokens. A slot holds its key in lanes
        [0, key_dim), its value in lanes [key_dim, key_dim + value_dim) and anything at all up to the next multiple
        of 128.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries at or past
        ceil(context / page_size) may hold any number. It stays in HBM. A width that is not a multiple of 128 costs a
        padded copy of the table.
      row: the row each query belongs to; queries may share one. Out of range for a padding query, whose context is 0.
      context: how many positions each query sees, at most width × page_size. 0 gives exactly zero and reads nothing.
      page_offset: layer × pages per layer.
      value_dim: lanes of a value, 64 or 128.
      scale: what logits are multiplied by.
      facts: the chip that the kernel is compiled for.
      pages_per_block: pages that one step brings in and computes, a power of two up to 128; None chooses by `facts`.
      interpret: as in `pl.pallas_call`.

    Softmax statistics are float32; float32 products are exact to float32 (Precision.HIGHEST), bfloat16 products
    accumulate in float32. Cost: each query reads the pages of its context once and computes whole blocks of them; on a
    chip with two cores the queries are shared between them when their number is even.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take.
    """
    check_arguments(q, pool, pages, row, context, value_dim=value_dim, facts=facts, pages_per_block=pages_per_block)
    queries, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    group = q_heads // kv_heads
    cores = gcd(queries, facts.tensor_cores)
    queries_per_core = queries // cores
    pages_per_block = pages_per_block or default_pages_per_block(pool, facts)

    def per_query(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, kv_heads, group, dim), lambda core, i, *_: (core * queries_per_core + i, 0, 0, 0))

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    call = pl.pallas_call(
        partial(_kernel, queries_per_core=queries_per_core, value_dim=value_dim, scale=scale),
        out_shape=jax.ShapeDtypeStruct((queries, kv_heads, group, value_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, queries_per_core),
            in_specs=[per_query(key_dim), in_hbm, in_hbm],
            out_specs=per_query(value_dim),
            scratch_shapes=PageStream.scratch(RING_BLOCKS, (kv_heads, pages_per_block * page_size, lanes), pool.dtype),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_decode",
    )
    grouped = q.reshape(queries, kv_heads, group, key_dim)
    padded_pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % SLICE)))
    out = call(row, context, jnp.reshape(page_offset, 1), grouped, pool, padded_pages)
    return out.reshape(queries, q_heads, value_dim)


def default_pages_per_block(pool: Float[Array, "total_pages kv_heads page_size lanes"], facts: TpuFacts) -> int:
    """A power of two, at least 1: the pages HBM delivers in COPY_SECONDS, within MAX_BLOCK_TOKENS and a table slice."""
    page_size = pool.shape[2]
    most = min(facts.hbm_bytes_per_second * COPY_SECONDS / _page_bytes(pool), MAX_BLOCK_TOKENS / page_size, SLICE)
    return 1 << max(0, int(most).bit_length() - 1)


def check_arguments(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    *,
    value_dim: int,
    facts: TpuFacts,
    pages_per_block: int | None = None,
) -> None:
    """Raises ValueError, saying what to change, unless `paged_decode` takes arguments of these shapes and dtypes."""
    check_decode_arguments(q, pool, pages, row, context, value_dim=value_dim, lane_multiple=LANES)
    queries = q.shape[0]
    if pages_per_block is not None and pages_per_block not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"{pages_per_block=}; choose a power of two from 1 to {SLICE}, or None")
    ring_bytes = RING_BLOCKS * (pages_per_block or 1) * _page_bytes(pool)
    if ring_bytes > facts.vmem_bytes // 2:
        raise ValueError(
            f"{ring_bytes=} for {pool.shape=} and {pages_per_block=}; at most half of {facts.vmem_bytes=} "
            f"({facts.name}) is given to them: take fewer pages a block, smaller pages, or shard the heads"
        )
    scalar_bytes = 2 * 4 * queries
    if scalar_bytes > facts.smem_bytes // 2:
        raise ValueError(
            f"{queries=} need {scalar_bytes=} of scalar memory; at most half of {facts.smem_bytes=} ({facts.name}) is "
            "given to them: split the queries over several calls"
        )


def _kernel(
    row: Ref,
    context: Ref,
    page_offset: Ref,
    q: Ref,
    pool: Ref,
    pages: Ref,
    out: Ref,
    *scratch: Ref,
    queries_per_core: int,
    value_dim: int,
    scale: float,
) -> None:
    """One query. Its blocks were sent for by earlier grid steps; it sends for those that follow."""
    first = pl.program_id(0) * queries_per_core
    query = first + pl.program_id(1)
    stream = PageStream(pool, pages, row, context, page_offset, first + queries_per_core, *scratch)

    @pl.when(pl.program_id(1) == 0)
    def open_stream():
        stream.open(first)

    kv_heads, group, key_dim = q.shape
    # The columns of 128 lanes that hold keys, and those that hold values: one and the same for heads of 64. Then the
    # keys' product runs over lanes of V as well, which zeros in q silence, and the values' product makes lanes of K,
    # which are dropped at the end. That is cheaper than shifting every slot by half a column.
    key_lanes = _round_up(key_dim, LANES)
    first_value_lane = key_dim // LANES * LANES
    query_lanes = jnp.pad(q[...], ((0, 0), (0, 0), (0, key_lanes - key_dim)))

    def attend(block, state):
        stream.start_next()
        buffer = stream.take(query, block)
        visible = context[query] - block * stream.block_tokens
        _clear_from(visible, buffer)
        keys = buffer[:, :, :key_lanes]
        values = buffer[:, :, first_value_lane:]
        return _attend_block(query_lanes, keys, values, visible, scale, state)

    nothing = (
        jnp.full((kv_heads, group, 1), MASKED, jnp.float32),
        jnp.zeros((kv_heads, group, 1), jnp.float32),
        jnp.zeros((kv_heads, group, pool.shape[-1] - first_value_lane), jnp.float32),
    )
    _, total, weighted = lax.fori_loop(0, stream.blocks(query), attend, nothing)
    start = key_dim - first_value_lane
    weighted = weighted[:, :, start : start + value_dim]
    out[...] = (weighted / jnp.where(total == 0, 1, total)).astype(out.dtype)


def _clear_from(visible: Scalar, buffer: Ref) -> None:
    """Zeroes the slots from `visible` on: a weight of zero does not silence a NaN."""

    @pl.when(visible < buffer.shape[1])
    def clear():
        slots = buffer[...]
        slot = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
        # Through float32, since not every TPU selects in bfloat16.
        buffer[...] = jnp.where(slot < visible, slots.astype(jnp.float32), 0).astype(slots.dtype)


State = tuple[
    Float[Array, "kv_heads group 1"],  # the largest logit so far
    Float[Array, "kv_heads group 1"],  # the sum of weights, relative to it
    Float[Array, "kv_heads group value_lanes"],  # the weighted sum of values, relative to it
]


def _attend_block(
    q: Float[Array, "kv_heads group key_lanes"],
    keys: Float[Array, "kv_heads tokens key_lanes"],
    values: Float[Array, "kv_heads tokens value_lanes"],
    visible: Scalar,
    scale: float,
    state: State,
) -> State:
    """Takes a block of tokens, of which the first `visible` count, into the running softmax."""
    maximum, total, weighted = state
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)

    logits = scale * product("hgd,htd->hgt", q, keys)
    slot = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    logits = jnp.where(slot < visible, logits, MASKED)

    new_maximum = jnp.maximum(maximum, logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - new_maximum)
    decay = jnp.exp(maximum - new_maximum)
    total = decay * total + weights.sum(axis=-1, keepdims=True)
    weighted = decay * weighted + product("hgt,htd->hgd", weights.astype(values.dtype), values)
    return new_maximum, total, weighted


def _page_bytes(pool: Float[Array, "total_pages kv_heads page_size lanes"]) -> int:
    _, kv_heads, page_size, lanes = pool.shape
    return kv_heads * page_size * lanes * pool.dtype.itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
