"""Paged attention for TPU (Pallas Mosaic TPU): tiles of queries over keys and values in pages.

The grid runs over tiles of queries, and each reads its context block by block under a running softmax, from pages as in
Kwon et al. 2023 (arXiv:2309.06180). `page_stream` brings the blocks, `running_softmax` computes, `cores` shares the
work, `block_rule` chooses the sizes; this file puts them together.
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

from pallas_kernels.arguments import Attention, Scales, Tiles, check_arguments
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu import cores
from pallas_kernels.tpu.block_rule import choose_blocks
from pallas_kernels.tpu.page_stream import SLICE, PageStream, TileRefs, in_tiles
from pallas_kernels.tpu.running_softmax import LANES, RunningSoftmax, matmul
from pallas_kernels.tpu.slots import load_slots, load_token_scales, product_dtype
from pallas_kernels.tpu.spans import Scalar
from pallas_kernels.tpu.visibility import Visibility
from pallas_kernels.tuned import AttentionShape, tuned_sizes

TILE_LINES = 128  # query lines of one KV head that a tile had better not exceed: more make larger blocks of everything

Ref = Any  # a Pallas reference


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
    facts: TpuFacts,
    pages_per_block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries over the pages of their rows, as `pallas_kernels.reference` defines it.

    Args:
      q: bfloat16, float32, or float16 with a quantised pool. Query head h reads KV head h // (q_heads / kv_heads).
        Places without a query may hold anything.
      pool: the pages of all layers, in the dtype of q, or quantised: float8_e4m3fn, float8_e5m2, int8. A slot holds
        its key in lanes [0, key_dim), its value in lanes [key_dim, key_dim + value_dim) and anything at all up to the
        next multiple of 128.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries of pages that no query sees
        may hold any number; any other is trusted to be in the pool. It stays in HBM. A width that is not a multiple of
        128 costs a padded copy of the table.
      tiles: whose queries they are, and what they see.
      page_offset: layer × pages per layer.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value.
      scales: what quantised keys and values are multiplied by.
      facts: the chip that the kernel is compiled for.
      pages_per_block: pages that one step brings in and computes, a power of two; None takes the sizes that `facts`
        has tuned for this shape, or chooses by `block_rule`.
      interpret: as in `pl.pallas_call`.

    Softmax statistics are float32. Products of bfloat16 accumulate in float32; those of float32 and float16 queries are
    exact to float32 (Precision.HIGHEST). Cost: each tile reads the pages that its queries see once, and computes whole
    blocks of them; a chip with two cores shares the blocks of all tiles evenly between them.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for a pool of
    float16.
    """
    check_arguments(q, pool, pages, tiles, attention=attention, sinks=sinks, scales=scales, lane_multiple=LANES)
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
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    call = pl.pallas_call(
        partial(
            _kernel,
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
                pl.BlockSpec(memory_space=pltpu.SMEM),
                per_tile(key_dim, tile_of),
                tuple(pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sink_lines),
                in_hbm,
                tuple(in_hbm for _ in sources),
            ],
            out_specs=(per_tile(value_dim, lambda *at: tile_of(*at) + at[0]), tuple(map(per_core, half_dims))),
            scratch_shapes=[
                RunningSoftmax.scratch(kv_heads, lines, value_lanes),
                PageStream.scratch(blocks.buffers, blocks.pages, sources),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=blocks.vmem_bytes,
            # Page ids are trusted: a check is 13 of the 16 bundles that starting a copy takes.
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
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
        jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % SLICE))),
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
    pages: Ref,
    sources: tuple[Ref, ...],
    out: Ref,
    halves: tuple[Ref, ...],
    softmax_refs: list[Ref],
    stream_refs: list[Ref],
    *,
    attention: Attention,
    tokens: int,
    scales_per_token: tuple[bool, bool],
) -> None:
    """One tile. Its blocks were sent for by earlier grid steps; it sends for those that follow."""
    core, step = pl.program_id(0), pl.program_id(1)
    tiles = TileRefs(row, queries, context, shares, core, attention)
    stream = PageStream(tiles, pages, page_offset, sources, *stream_refs)
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
