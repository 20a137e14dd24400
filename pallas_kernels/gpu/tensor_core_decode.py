"""Paged decode in bfloat16 for Hopper: both products on the tensor cores, accumulated in float32.

One thread block, of one warpgroup, takes the query heads that read one KV head, padded to the 64 rows of a WGMMA
instruction, and folds a flash-decode step over its blocks of tokens (Dao et al. 2022, arXiv:2205.14135).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.gpu.layouts import MATRIX, PER_ROW, along_rows, filled, tiled
from pallas_kernels.gpu.page_stream import BLOCK, PageStream, Ref, Scalar, visible

TILE = 64  # rows of a WGMMA instruction
PADDING = 8  # query heads are padded to whole rows of shared-memory tiles


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
    out_dtype: Any,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "splits queries q_heads value_dim"], Float[Array, "splits queries q_heads"]]:
    """The attention of each split of each context, and the base-2 logarithm of its softmax denominator.

    An empty split answers zero and −inf.
    """
    queries, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    group = q_heads // kv_heads
    tile_heads, tiles = tiling(group)
    padding = tiles * tile_heads - group
    q = jnp.pad(q.reshape(queries, kv_heads, group, key_dim), ((0, 0), (0, 0), (0, padding), (0, 0)))
    q = q.reshape(queries, kv_heads * tiles, tile_heads, key_dim)

    def body(q, pool, pages, row, context, page_offset, out, log_total, *scratch):
        q_tile, weights, log_tile, (ring, out_tile), q_arrived, arrived = scratch
        split, query, tile = (lax.axis_index(name) for name in ("split", "query", "tile"))
        seen = context[query]
        stream = PageStream(
            pool, pages, lax.div(tile, tiles), row[query], seen, page_offset[0], split, splits, ring, arrived
        )
        # Rows of the tile past the padded heads hold anything: rows never mix, and these are not written out.
        plgpu.copy_gmem_to_smem(q.at[query, tile], q_tile.at[pl.ds(0, tile_heads)], q_arrived)
        stream.open()
        plgpu.barrier_wait(q_arrived)

        def attend(block, buffer, state):
            keys = buffer.at[:, pl.ds(0, key_dim)]
            values = buffer.at[:, pl.ds(key_dim, value_dim)]
            _clear_past(block, seen, values)
            return _attend_block(block, seen, q_tile, keys, values, weights, scale * math.log2(math.e), state)

        nothing = (
            filled(-jnp.inf, (TILE,), PER_ROW),
            filled(0, (TILE,), PER_ROW),
            filled(0, (TILE, value_dim), MATRIX),
        )
        maximum, total, weighted = stream.fold(attend, nothing)
        out_tile[...] = (weighted * along_rows(jnp.where(total > 0, 1 / total, 0), weighted)).astype(out_dtype)
        log_tile[...] = maximum + jnp.log2(total)
        plgpu.commit_smem()
        heads = pl.ds(0, tile_heads)
        plgpu.copy_smem_to_gmem(out_tile.at[heads], out.at[split, query, tile])
        plgpu.copy_smem_to_gmem(log_tile.at[heads], log_total.at[split, query, tile])
        plgpu.wait_smem_to_gmem(0)

    ring, arrived = PageStream.scratch(buffers, page_size, lanes, pool.dtype)
    out, log_total = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((splits, queries, kv_heads * tiles, tile_heads, value_dim), out_dtype),
            jax.ShapeDtypeStruct((splits, queries, kv_heads * tiles, tile_heads), jnp.float32),
        ],
        scratch_types=[
            tiled((TILE, key_dim), q.dtype),
            tiled((TILE, BLOCK), q.dtype),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.RefUnion(ring, tiled((TILE, value_dim), out_dtype)),  # the output is written when the ring is done
            plgpu.Barrier(),
            arrived,
        ],
        grid=(splits, queries, kv_heads * tiles),
        grid_names=("split", "query", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, pool, pages, row, context, jnp.reshape(page_offset, 1))

    def heads(padded: Array, *dims: int) -> Array:
        grouped = padded.reshape(splits, queries, kv_heads, tiles * tile_heads, *dims)
        return grouped[:, :, :, :group].reshape(splits, queries, q_heads, *dims)

    return heads(out, value_dim), heads(log_total)


def tiling(group: int) -> tuple[int, int]:
    """How many query heads one thread block takes, and how many such tiles the heads of one KV head need."""
    tile_heads = min(-(-group // PADDING) * PADDING, TILE)
    return tile_heads, -(-group // tile_heads)


def scratch_bytes(key_dim: int) -> int:
    """Shared memory of a thread block beside its ring: queries, weights, and a logarithm for each row."""
    return TILE * (2 * key_dim + 2 * BLOCK + 4)


def _clear_past(block: Scalar, context: Scalar, values: Ref) -> None:
    """Zeroes the values at or past the context: a weight of zero does not silence a NaN."""

    @pl.when((block + 1) * BLOCK > context)
    def clear():
        values[...] = jnp.where(visible(block, context, values.shape, 0, MATRIX), values[...], 0)
        plgpu.commit_smem()


def _mask(block: Scalar, context: Scalar, logits: Array) -> Array:
    return jnp.where(visible(block, context, logits.shape, 1, MATRIX), logits, -jnp.inf)


def _attend_block(
    block: Scalar, context: Scalar, q: Ref, keys: Ref, values: Ref, weights: Ref, scale: float, state: Any
) -> Any:
    """Takes a block of tokens into the running softmax, whose exponents are of base 2."""
    maximum, total, weighted = state
    logits = _mask(block, context, scale * _product(q, keys.transpose((1, 0))))
    new_maximum = jnp.maximum(maximum, logits.max(axis=1))
    decay = jnp.exp2(maximum - new_maximum)
    weight = jnp.exp2(logits - along_rows(new_maximum, logits))
    weights[...] = weight.astype(weights.dtype)
    plgpu.commit_smem()
    total = decay * total + weight.sum(axis=1)
    weighted = along_rows(decay, weighted) * weighted + _product(weights, values)
    return new_maximum, total, weighted


def _product(a: Ref, b: Ref) -> Array:
    """a @ b on the tensor cores, in float32; both in shared memory."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
