"""Paged decode in float32 for Hopper: exact products on the CUDA cores, for the tensor cores would round to TF32.

One thread block, of one warpgroup, takes one query head. Each of the BLOCK places in a block keeps a softmax of its
own over the tokens that pass through it; the places are merged once, at the end, so that no step exchanges anything
between warps.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu.layouts import MATRIX, PER_COLUMN, PER_ROW, along_rows, filled
from pallas_kernels.gpu.page_stream import BLOCK, PageStream, Ref, Scalar, visible

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # a masked logit: finite, for −inf − (−inf) would be NaN


def decode(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    page_offset: Int32[Array, ""],
    *,
    value_dim: int,
    scale: float,
    splits: int,
    buffers: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "splits queries q_heads value_dim"], Float[Array, "splits queries q_heads"]]:
    """The attention of each split of each context, and the base-2 logarithm of its softmax denominator.

    An empty split answers zero and −inf.
    """
    queries, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    group = q_heads // kv_heads

    def body(q, pool, pages, row, context, page_offset, out, log_total, q_row, out_row, q_arrived, *ring):
        split, query, q_head = (lax.axis_index(name) for name in ("split", "query", "q_head"))
        seen = context[query]
        stream = PageStream(pool, pages, lax.div(q_head, group), row[query], seen, page_offset[0], split, splits, *ring)
        plgpu.copy_gmem_to_smem(q.at[query, q_head], q_row, q_arrived)
        stream.open()
        plgpu.barrier_wait(q_arrived)
        scaled_q = scale * math.log2(math.e) * plgpu.load(q_row, layout=PER_COLUMN)

        def attend(block, buffer, state):
            return _attend_block(block, seen, scaled_q, buffer, value_dim, state)

        nothing = (
            filled(MASKED, (BLOCK,), PER_ROW),
            filled(0, (BLOCK,), PER_ROW),
            filled(0, (BLOCK, value_dim), MATRIX),
        )
        out_row[...], log_total[split, query, q_head] = _merge_places(*stream.fold(attend, nothing))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_row, out.at[split, query, q_head])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((splits, queries, q_heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((splits, queries, q_heads), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((key_dim,), jnp.float32),
            plgpu.SMEM((value_dim,), jnp.float32),
            plgpu.Barrier(),
            *PageStream.scratch(buffers, page_size, lanes, pool.dtype),
        ],
        grid=(splits, queries, q_heads),
        grid_names=("split", "query", "q_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, pool, pages, row, context, jnp.reshape(page_offset, 1))


def scratch_bytes(key_dim: int, value_dim: int) -> int:
    """Shared memory of a thread block beside its ring: the query and the output."""
    return 4 * (key_dim + value_dim)


def _attend_block(block: Scalar, context: Scalar, scaled_q: Array, buffer: Ref, value_dim: int, state: Any) -> Any:
    """Takes a block of tokens into the running softmax of each place, whose exponents are of base 2."""
    maximum, total, weighted = state
    (key_dim,) = scaled_q.shape
    keys = buffer[:, pl.ds(0, key_dim)]
    logits = _mask(block, context, (keys * lax.broadcast_in_dim(scaled_q, keys.shape, (1,))).sum(axis=1))
    values = _clear_past(block, context, buffer[:, pl.ds(key_dim, value_dim)])
    plgpu.commit_smem()  # every warp has read the buffer before it is sent for again
    new_maximum = jnp.maximum(maximum, logits)
    decay = jnp.exp2(maximum - new_maximum)
    weight = jnp.where(logits == MASKED, 0, jnp.exp2(logits - new_maximum))
    total = decay * total + weight
    weighted = along_rows(decay, values) * weighted + along_rows(weight, values) * values
    return new_maximum, total, weighted


def _mask(block: Scalar, context: Scalar, logits: Array) -> Array:
    return jnp.where(visible(block, context, logits.shape, 0, PER_ROW), logits, MASKED)


def _clear_past(block: Scalar, context: Scalar, values: Array) -> Array:
    """Zeroes the values at or past the context: a weight of zero does not silence a NaN."""
    return jnp.where(visible(block, context, values.shape, 0, MATRIX), values, 0)


def _merge_places(maximum: Array, total: Array, weighted: Array) -> tuple[Array, Array]:
    """The softmax over all places, and the base-2 logarithm of its denominator. Places that saw nothing weigh 0."""
    top = maximum.max(axis=0)
    share = jnp.exp2(maximum - top)
    denominator = (share * total).sum(axis=0)
    out = (along_rows(share, weighted) * weighted).sum(axis=0)
    return out * jnp.where(denominator > 0, 1 / denominator, 0), top + jnp.log2(denominator)
