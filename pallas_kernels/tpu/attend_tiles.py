"""Attention of tiles of queries over keys and values in pages, wherever a stream finds those (Pallas Mosaic TPU).

The grid runs over tiles of queries, and each reads its context block by block under a running softmax, from pages as in
Kwon et al. 2023 (arXiv:2309.06180). A kind of `block_stream` brings the blocks, `running_softmax` computes, `cores`
shares the work, `block_rule` chooses the sizes; this file puts them together for the public kernels, `paged_attention`
and `extent_attention`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu import cores
from pallas_kernels.tpu.block_rule import choose_blocks
from pallas_kernels.tpu.block_stream import BlockStream, TileRefs, in_tiles
from pallas_kernels.tpu.running_softmax import LANES, RunningSoftmax, matmul
from pallas_kernels.tpu.slots import load_slots, load_token_scales, product_dtype
from pallas_kernels.tpu.spans import Scalar
from pallas_kernels.tpu.table_slices import padded
from pallas_kernels.tpu.visibility import Visibility
from pallas_kernels.tuned import AttentionShape, tuned_sizes

Ref = Any  # a Pallas reference


def attend_tiles(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    tables: tuple[Int32[Array, "rows width"], ...],
    lengths: tuple[Int32[Array, " rows"], ...],
    tiles: Tiles,
    page_offset: Int32[Array, ""],
    *,
    stream: type[BlockStream],
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
    facts: TpuFacts,
    pages_per_block: int | None,
    interpret: bool | pltpu.InterpretParams,
    name: str,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """What `paged_attention` computes, of checked arguments.

    Args:
      tables, lengths: where the pages of the rows are, as `stream` reads it. Tables stay in HBM.
      stream: the kind of stream.
      name: of the kernel, in traces.
      q, pool, tiles, page_offset, attention, sinks, scales, facts, pages_per_block, interpret: as there.
    """
    if pool.dtype == jnp.float16:
        # Mosaic takes no argument of float16, and its bits as int16 cost XLA a copy of the whole pool.
        raise NotImplementedError(
            f"{pool.dtype=} on {facts.name}; keep keys and values in bfloat16, float32, float8 or int8 on a TPU"
        )
    shape = AttentionShape.of(q, pool, attention, scales)
    out_dtype = q.dtype
    if out_dtype == jnp.float16:
        q = q.astype(jnp.float32)
    number, tokens, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    value_dim = attention.value_dim
    lines = tokens * (q_heads // kv_heads)
    token_scales, head_scales = _sort_scales(scales, attention, kv_heads)
    sizes = tuned_sizes(facts, shape) if pages_per_block is None else {"pages_per_block": pages_per_block}
    blocks = choose_blocks(shape, facts, **sizes)
    shares = cores.shares(tiles, attention, blocks.pages * page_size, facts.tensor_cores)

    def tile_of(core, step, row, queries, context, shares, *_):
        return jnp.minimum(shares[core, 0] + step, jnp.maximum(shares[core, 1] - 1, 0))

    def per_tile(dim: int, index: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, kv_heads, lines, dim), lambda *at: (index(*at), 0, 0, 0))

    def per_core(dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, kv_heads, lines, dim), lambda core, *_: (core, 0, 0, 0))

    struct = jax.ShapeDtypeStruct
    half_dims = (1, 1, value_dim) if facts.tensor_cores > 1 else ()
    sources = (in_tiles(pool), *token_scales)
    sink_lines = () if sinks is None else (_of_lines(sinks[None, None, :, None], (1, tokens, q_heads, 1), kv_heads)[0],)
    value_lanes = lanes - key_dim // LANES * LANES
    in_hbm, in_smem = (pl.BlockSpec(memory_space=memory) for memory in (pltpu.HBM, pltpu.SMEM))

    call = pl.pallas_call(
        partial(
            _kernel,
            stream_of=stream,
            attention=attention,
            tokens=tokens,
            scales_per_token=(
                scales is not None and scales.key.ndim == 2,
                scales is not None and scales.value.ndim == 2,
            ),
        ),
        out_shape=(
            struct((number + facts.tensor_cores - 1, kv_heads, lines, value_dim), q.dtype),
            tuple(struct((facts.tensor_cores, kv_heads, lines, dim), jnp.float32) for dim in half_dims),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(facts.tensor_cores, shares.steps),
            in_specs=[
                in_smem,
                per_tile(key_dim, tile_of),
                tuple(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sink_lines),
                tuple(in_hbm for _ in tables),
                tuple(in_smem for _ in lengths),
                tuple(in_hbm for _ in sources),
            ],
            out_specs=(per_tile(value_dim, lambda *at: tile_of(*at) + at[0]), tuple(map(per_core, half_dims))),
            scratch_shapes=[
                RunningSoftmax.scratch(kv_heads, lines, value_lanes),
                stream.scratch(blocks.buffers, blocks.pages, sources, len(tables)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_bytes,
            # Page ids are trusted: a check is 13 of the 16 bundles that starting a copy takes.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=name,
    )
    out, halves = call(
        tiles.row,
        tiles.queries,
        tiles.context,
        shares.of_cores,
        jnp.reshape(page_offset, 1),
        head_scales,
        _of_lines(q, q.shape, kv_heads),
        sink_lines,
        tuple(map(padded, tables)),
        lengths,
        sources,
    )
    if halves:
        out = cores.join(out, shares, halves)
    out = out.reshape(number, kv_heads, tokens, -1, value_dim).swapaxes(1, 2)
    return out.reshape(number, tokens, q_heads, value_dim).astype(out_dtype)


def _of_lines(x: Array, shape: tuple[int, ...], kv_heads: int) -> Array:
    """[tiles, tokens, q_heads, dim] as [tiles, kv_heads, lines, dim]; a line is a place and a head of the group."""
    number, tokens, q_heads, dim = shape
    grouped = jnp.broadcast_to(x, shape).reshape(number, tokens, kv_heads, q_heads // kv_heads, dim)
    return grouped.swapaxes(1, 2).reshape(number, kv_heads, -1, dim)


def _sort_scales(
    scales: Scales | None, attention: Attention, kv_heads: int
) -> tuple[tuple[Float32[Array, "total_pages scale_lanes"], ...], Float32[Array, "2 kv_heads"]]:
    """The pools of scales per token, and what remains for each head: of logits in row 0, of values in row 1."""
    both = (scales.key, scales.value) if scales else (1.0, 1.0)
    per_token = tuple(jnp.asarray(scale) for scale in both if jnp.ndim(scale) == 2)
    per_head = [jnp.broadcast_to(1.0 if jnp.ndim(scale) == 2 else scale, (kv_heads,)) for scale in both]
    return per_token, jnp.stack(per_head).astype(jnp.float32) * jnp.array([[attention.scale], [1.0]], jnp.float32)


def _kernel(
    row: Ref,
    queries: Ref,
    context: Ref,
    shares: Ref,
    page_offset: Ref,
    head_scales: Ref,
    q: Ref,
    sinks: tuple[Ref, ...],
    tables: tuple[Ref, ...],
    lengths: tuple[Ref, ...],
    sources: tuple[Ref, ...],
    out: Ref,
    halves: tuple[Ref, ...],
    softmax_refs: list[Ref],
    stream_refs: list[Ref],
    *,
    stream_of: type[BlockStream],
    attention: Attention,
    tokens: int,
    scales_per_token: tuple[bool, bool],
) -> None:
    """One tile. Its blocks were sent for by earlier grid steps; it sends for those that follow."""
    core, step = pl.program_id(0), pl.program_id(1)
    tiles = TileRefs(row, queries, context, shares, core, attention)
    stream = stream_of(tiles, tables, lengths, page_offset, sources, *stream_refs)
    softmax = RunningSoftmax(*softmax_refs)
    tile = tiles.first + step

    @pl.when(step == 0)
    def open_stream():
        stream.open()

    @pl.when(tile < tiles.end)
    def attend():
        start, span = stream.blocks(tile)
        whole_tile = tiles.positions(tile).in_units_of(stream.block_tokens)
        softmax.open(sinks[0][...] if sinks else None, start == whole_tile.start)
        visibility = Visibility(attention, queries[tile], context[tile], tokens, q.shape[1])
        attend_block = partial(_attend_block, q, head_scales, softmax, attention.soft_cap, scales_per_token)

        def take(block: Scalar) -> Scalar:
            stream.start_next()
            buffers = stream.take(tile, block)
            first = block * stream.block_tokens
            sees_all = visibility.sees_all(first, first + stream.block_tokens)

            @pl.when(sees_all)
            def inner_block():
                attend_block(buffers, None, first)

            @pl.when(~sees_all)
            def edge_block():
                attend_block(buffers, visibility, first)

            return span.after(block)

        lax.while_loop(lambda block: block < span.end, take, start)
        _answer(softmax, head_scales, visibility, q.shape[2] % LANES, out, halves, tile == shares[0, 1] - 1)


def _attend_block(
    q: Ref,
    head_scales: Ref,
    softmax: RunningSoftmax,
    soft_cap: float | None,
    scales_per_token: tuple[bool, bool],
    buffers: tuple[Ref, ...],
    visibility: Visibility | None,
    first: Scalar,
) -> None:
    """Takes one block into account; with `visibility` where not every line sees all of it."""
    kv_heads, _, key_dim = q.shape
    slots, *rows = buffers
    key_rows, value_rows = (rows.pop(0) if per_token else None for per_token in scales_per_token)
    pages, _, tiles, rows_of_tile, lanes = slots.shape
    page_size = tiles * rows_of_tile
    tokens = pages * page_size
    # The columns of 128 lanes that hold keys, and those that hold values: one and the same for heads of 64. Then the
    # keys' product runs over lanes of V as well, which zeros in q silence, and the values' product makes lanes of K,
    # which are dropped at the end. That is cheaper than shifting every slot by half a column.
    key_lanes = -(-key_dim // LANES) * LANES
    first_value_lane = key_dim // LANES * LANES
    dtype = product_dtype(q.dtype)
    visible = of_slots = None
    if visibility is not None:
        visible = visibility.of_lines(first, tokens)
        of_slots = visibility.of_slots(first, (tokens, lanes - first_value_lane))

    for head in range(kv_heads):
        of_head = load_slots(slots, head, dtype)
        query = jnp.pad(q[head].astype(dtype), ((0, 0), (0, key_lanes - key_dim)))
        logits = head_scales[0, head] * matmul(query, of_head[:, :key_lanes], transpose=True)
        if key_rows is not None:
            logits *= load_token_scales(key_rows, head, page_size)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        values = of_head[:, first_value_lane:]
        if of_slots is not None:
            # A weight of zero does not silence a NaN. Through float32, since not every TPU selects in bfloat16.
            values = jnp.where(of_slots, values.astype(jnp.float32), 0).astype(dtype)
        value_scales = None if value_rows is None else load_token_scales(value_rows, head, page_size)
        softmax.take(head, logits, values, value_scales, visible)


def _answer(
    softmax: RunningSoftmax,
    head_scales: Ref,
    visibility: Visibility,
    lane: int,
    out: Ref,
    halves: tuple[Ref, ...],
    is_cut: Scalar,
) -> None:
    """Writes what the tile's blocks have come to; where the tile is cut in two, also as half of a softmax."""
    kv_heads, lines, value_dim = out.shape
    # A line without a query has taken whatever stood there.
    has_query = visibility.has_query((lines, 1))
    for head in range(kv_heads):
        total = jnp.where(has_query, softmax.total[head].sum(axis=1, keepdims=True), 0)
        weighted = softmax.weighted[head][:, lane : lane + value_dim] * head_scales[1, head]
        weighted = jnp.where(visibility.has_query(weighted.shape), weighted, 0)
        out[head] = (weighted / jnp.where(total > 0, total, 1)).astype(out.dtype)
        if halves:

            @pl.when(is_cut)
            def keep_half(head=head, total=total, weighted=weighted):
                reference = jnp.where(has_query, softmax.reference[head][:, :1], 0)
                for half, value in zip(halves, (reference, total, weighted), strict=True):
                    half[head] = value
