"""Attention for Hopper GPUs (Pallas Mosaic GPU): tiles of queries over keys and values, wherever those stand.

A running softmax as in Dao et al. 2022 (arXiv:2205.14135), one warpgroup that copies for those that compute as in Shah
et al. 2024 (FlashAttention-3, arXiv:2407.08608, §3.1). `schedule` shares the work and merges the pieces, `page_stream`
and `span_stream` bring the blocks, `tensor_core` and `cuda_core` compute, `block_rule` chooses the sizes; this file
puts them together.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.gpu.block_rule import Blocks, choose_blocks
from pallas_kernels.gpu.cuda_core import CudaCore
from pallas_kernels.gpu.layouts import PER_ROW, lanes_at_once, tiled
from pallas_kernels.gpu.masks import Mask
from pallas_kernels.gpu.page_stream import Pages
from pallas_kernels.gpu.ring import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import make_schedule, merge
from pallas_kernels.gpu.span_stream import Spans
from pallas_kernels.gpu.tensor_core import PADDING, TILE, TensorCore
from pallas_kernels.gpu.worker import Worker
from pallas_kernels.hardware import GpuFacts
from pallas_kernels.tuned import AttentionShape, tuned_sizes

HOPPER = (9, 0)
TILE_LINES = 64  # query lines of one KV head that a tile had better not exceed: the rows of a matrix instruction
# Registers of a thread in three warpgroups, which get 168 each: the producer only counts and starts copies.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


def attend_items(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    source: Pages | Spans,
    tiles: Tiles,
    *,
    shape: AttentionShape,
    most_blocks: int,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None,
    scales: tuple[Float32[Array, "*_"], Float32[Array, "*_"]],
    facts: GpuFacts,
    workers: int | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries over keys and values from `source`.

    Args:
      q, tiles, attention, sinks, facts, workers, interpret: as the kernels say.
      source: where keys and values stand.
      shape: what the rule looks at.
      most_blocks: blocks that a row may have.
      scales: what keys and values are multiplied by, beside those per token: one number, or one a KV head.

    Raises ValueError if there are no workers, or more blocks than 32 bits count; NotImplementedError for a GPU that is
    not a Hopper.
    """
    if facts.compute_capability != HOPPER:
        raise NotImplementedError(
            f"{facts.name} has {facts.compute_capability=}; this kernel is for Hopper {HOPPER}: use the XLA path"
        )
    sizes = tuned_sizes(facts, shape)
    tuned_workers = sizes.pop("workers", facts.multiprocessors)
    workers = tuned_workers if workers is None else workers
    if workers < 1:
        raise ValueError(f"{workers=}; choose at least 1, or None")
    number, tokens, q_heads, _ = q.shape
    query_lines = Lines(tokens, q_heads, shape.kv_heads, exact=q.dtype == jnp.float32)
    items = number * query_lines.items
    if items * most_blocks >= 2**31:
        raise ValueError(
            f"{q.shape=} and rows of {most_blocks} blocks are {items * most_blocks} units of work, 2³¹ or more; "
            "split the tiles over several calls"
        )
    dims = shape.key_dim, shape.value_dim, shape.query_dtype, shape.pool_dtype
    blocks = choose_blocks(*dims, shape.scales_per_token, facts, **sizes)
    head_scales = (jnp.broadcast_to(scale, (shape.kv_heads,)).astype(jnp.float32) for scale in scales)
    schedule = make_schedule(tiles, attention, query_lines.items, workers)
    rows = jnp.minimum(tiles.row, source.rows - 1)  # read, though not used, for tiles without queries too
    pieces, logs = _call(
        (query_lines.of(q), query_lines.ends(tiles)),
        source,
        (rows, tiles.queries, tiles.context, *head_scales),
        (schedule.shares, schedule.units, schedule.before, schedule.kept, schedule.skipped),
        query_lines=query_lines,
        attention=attention,
        pieces=items + workers,
        blocks=blocks,
        interpret=interpret,
    )
    out, log_total = merge(pieces, logs, schedule, items)
    out, log_total = query_lines.undo(out, number), query_lines.undo(log_total[..., None], number)
    seen = ~jnp.isneginf(log_total)
    if sinks is not None:
        out /= 1 + jnp.exp2(jnp.log2(jnp.e) * sinks[:, None] - jnp.where(seen, log_total, 0))
    return jnp.where(seen, out, 0).astype(q.dtype)


class Lines:
    """How the query lines of a tile are dealt out to items: the places and query heads that read one KV head.

    Attributes:
      items: of a tile.
      count: lines of an item, padding included.
    """

    def __init__(self, tokens: int, q_heads: int, kv_heads: int, exact: bool):
        self.tokens, self.q_heads, self.kv_heads = tokens, q_heads, kv_heads
        self.group = q_heads // kv_heads
        lines = tokens * self.group
        self.count = 1 if exact else min(-(-lines // PADDING) * PADDING, TILE)
        self.chunks = -(-lines // self.count)
        self.items = kv_heads * self.chunks
        self.padding = self.chunks * self.count - lines

    def of(self, q: Float[Array, "tiles tokens q_heads dim"]) -> Float[Array, "tiles items lines dim"]:
        """The lines of each item; zeros in padding."""
        number, _, _, dim = q.shape
        lines = q.reshape(number, self.tokens, self.kv_heads, self.group, dim).swapaxes(1, 2)
        lines = lines.reshape(number, self.kv_heads, self.tokens * self.group, dim)
        lines = jnp.pad(lines, ((0, 0), (0, 0), (0, self.padding), (0, 0)))
        return lines.reshape(number, self.items, self.count, dim)

    def undo(self, out: Float32[Array, "items lines dim"], number: int) -> Float32[Array, "tiles tokens q_heads dim"]:
        """The inverse of `of`."""
        dim = out.shape[-1]
        lines = out.reshape(number, self.kv_heads, self.chunks * self.count, dim)
        lines = lines[:, :, : self.tokens * self.group]
        lines = lines.reshape(number, self.kv_heads, self.tokens, self.group, dim).swapaxes(1, 2)
        return lines.reshape(number, self.tokens, self.q_heads, dim)

    def ends(self, tiles: Tiles) -> Int32[Array, "tiles chunks TILE"]:
        """One past the last position that each line of each chunk sees; 0 for lines without a query."""
        place = jnp.arange(self.chunks * self.count, dtype=jnp.int32) // self.group
        queries, context = tiles.queries[:, None], tiles.context[:, None]
        ends = jnp.where(place < queries, jnp.maximum(context - queries + 1 + place, 0), 0)
        ends = ends.reshape(-1, self.chunks, self.count)
        return jnp.pad(ends, ((0, 0), (0, 0), (0, TILE - self.count)))


def _call(
    arrays: tuple[Any, ...],
    source: Pages | Spans,
    scalars: tuple[Any, ...],
    schedule: tuple[Any, ...],
    *,
    query_lines: Lines,
    attention: Attention,
    pieces: int,
    blocks: Blocks,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float32[Array, "pieces consumers lines value_dim"], Float32[Array, "pieces consumers lines"]]:
    """Launches a thread block for each worker: warpgroups that compute, and one that copies."""
    q, stored = arrays[0], source.memory.dtype
    consumers = blocks.consumers
    key_dim, quantised, exact = q.shape[-1], stored != q.dtype, q.dtype == jnp.float32
    value_dim, lines = attention.value_dim, query_lines.count
    key_lanes, value_lanes = (lanes_at_once(dim, key_dim + value_dim, quantised) for dim in (key_dim, value_dim))
    if exact:
        query, own_scratch = plgpu.SMEM((1, key_dim), q.dtype), CudaCore.scratch(consumers, value_dim)
    else:
        query = tiled((TILE, key_dim), q.dtype, key_lanes)
        own_scratch = TensorCore.scratch(consumers, (key_dim, key_lanes), (value_dim, value_lanes), q.dtype, quantised)
    ring = partial(Ring.scratch, blocks.buffers, dtype=stored, copies=source.copies)

    def kernel(*refs):
        inputs, outputs, scratch = refs[: len(flat)], refs[len(flat) : len(flat) + 2], refs[len(flat) + 2 :]
        keys, values, query, own, ends, query_arrived, query_released = jax.tree.unflatten(scratch_tree, scratch)
        arrays, source, scalars, schedule = jax.tree.unflatten(tree, inputs)
        out, log = outputs
        worker = Worker(*schedule, lax.axis_index("worker"), query_lines.items)  # type: ignore[call-arg]
        memory = CudaCore(*own) if exact else TensorCore(*own, interpret is not None)  # type: ignore[call-arg]
        body = _Body(
            arrays,
            source,
            scalars,
            worker,
            out,
            log,
            Ring(*keys, key_lanes),  # type: ignore[call-arg]
            Ring(*values, value_lanes),  # type: ignore[call-arg]
            query,
            memory,
            ends,
            query_arrived,
            query_released,
            query_lines,
            attention,
            consumers,
        )

        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < consumers)
        def compute():
            if consumers > 1:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            body.compute(warpgroup)

        @pl.when(warpgroup == consumers)
        def copy():
            if consumers > 1:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            body.copy()

    flat, tree = jax.tree.flatten((arrays, source, scalars, schedule))
    scratch, scratch_tree = jax.tree.flatten(
        (
            ring(dim=key_dim, lanes=key_lanes, has_scales=source.key_scales is not None),
            ring(dim=value_dim, lanes=value_lanes, has_scales=source.value_scales is not None),
            query,
            own_scratch,
            plgpu.SMEM((TILE,), jnp.int32),
            plgpu.Barrier(num_arrivals=1 if exact else 2),
            plgpu.Barrier(num_arrivals=consumers),
        )
    )
    return plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((pieces, consumers, lines, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((pieces, consumers, lines), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(len(schedule[0]),),
        grid_names=("worker",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*flat)


class _Body:
    """One thread block."""

    def __init__(
        self,
        arrays: tuple[Ref, ...],
        source: Pages | Spans,
        scalars: tuple[Ref, ...],
        worker: Worker,
        out: Ref,
        log: Ref,
        keys: Ring,
        values: Ring,
        query: Ref,
        own: CudaCore | TensorCore,
        ends: Ref,
        query_arrived: Ref,
        query_released: Ref,
        query_lines: Lines,
        attention: Attention,
        consumers: int,
    ):
        self.q, self.ends_of_tiles = arrays
        self.row, self.queries, self.context, self.key_scale, self.value_scale = scalars
        self.source, self.worker = source, worker
        self.out, self.log, self.keys, self.values, self.ends = out, log, keys, values, ends
        self.query, self.own = query, own
        self.query_arrived, self.query_released = query_arrived, query_released
        self.lines, self.attention, self.consumers = query_lines, attention, consumers

    def copy(self) -> None:
        """Sends for the queries, keys and values of all items of the share."""
        key_dim = self.q.shape[-1]

        def of_item(tile, within, piece, turn, units, block_of, nth):
            kv_head, chunk = lax.div(within, self.lines.chunks), lax.rem(within, self.lines.chunks)
            stream = self.source.stream(self.attention, self.row[tile], kv_head, self.queries[tile], self.context[tile])
            first, end = units

            @pl.when(nth > 0)
            def wait():
                plgpu.barrier_wait(self.query_released)

            # What is beyond an item's lines stays: rows never mix.
            plgpu.copy_gmem_to_smem(
                self.q.at[tile, within], self.query.at[pl.ds(0, self.lines.count)], self.query_arrived
            )
            if isinstance(self.own, TensorCore):
                plgpu.copy_gmem_to_smem(self.ends_of_tiles.at[tile, chunk], self.ends, self.query_arrived)

            def send(unit, places):
                # Read now, used in the next turn: the latency is hidden behind the waits for room.
                following = stream.places(block_of(unit + 1))
                block, at = block_of(unit), turn + unit - first
                stream.send_keys(self.keys, at, block, places)
                stream.send_values(self.values, at, block, places, key_dim)
                return following

            lax.fori_loop(first, end, send, stream.places(block_of(first)))
            return nth + 1

        self.worker.walk(of_item, jnp.int32(0))

    def compute(self, consumer: Scalar) -> None:
        """Attends to the share, but for the blocks that the other consumers take in turn, and writes the pieces."""
        own = self.own.of(consumer)

        def of_item(tile, within, piece, turn, units, block_of, state):
            kv_head, chunk = lax.div(within, self.lines.chunks), lax.rem(within, self.lines.chunks)
            first, end = units
            plgpu.barrier_wait(self.query_arrived)
            queries, context = self.queries[tile], self.context[tile]
            if self.lines.tokens == 1:
                ends = context
            elif isinstance(own, TensorCore):
                ends = plgpu.load(self.ends, layout=PER_ROW)
            else:
                ends = self.ends_of_tiles[tile, chunk, 0]
            mask = Mask(self.attention, ends, queries, context)
            scale = self.attention.scale * self.key_scale[kv_head]
            own_first = first + lax.rem(consumer + lax.rem(turn, self.consumers), self.consumers)

            def take(index, softmax):
                unit = own_first + index * self.consumers
                at = turn + unit - first
                return own.take(
                    self.query,
                    self.keys,
                    self.values,
                    at,
                    block_of(unit),
                    mask,
                    scale,
                    self.attention.soft_cap,
                    softmax,
                )

            turns = pl.cdiv(jnp.maximum(end - own_first, 0), self.consumers)
            softmax = lax.fori_loop(0, turns, take, own.nothing(self.values))
            plgpu.commit_smem()  # every warp has read the queries before they are sent for again
            plgpu.barrier_arrive(self.query_released)
            own.write(softmax, self.value_scale[kv_head], self.out.at[piece, consumer], self.log.at[piece, consumer])
            return state

        self.worker.walk(of_item, jnp.int32(0))
