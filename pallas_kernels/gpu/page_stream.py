"""Brings keys and values from their pages in GPU memory to rings in shared memory, by bulk asynchronous copies.

The unit is a block of BLOCK consecutive tokens of one KV head. Keys and values have a ring each, so that the keys of
the next block are sent for while the values of this one are still in use. One warpgroup sends, others take and release;
they meet at the rings' barriers only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.layouts import tiled
from pallas_kernels.gpu.schedule import BLOCK

Ref = Any  # a Pallas reference
Scalar = Any  # a traced int32, or an int


@dataclass(frozen=True)
class Ring:
    """Buffers of blocks, each filled by one warpgroup and used by another, in turn.

    A warpgroup that waits at a barrier counts its phases, and must see them all. So the buffers are a multiple of the
    warpgroups that use them, and each of these always gets the same ones.
    """

    slots: Ref  # SMEM [buffers, BLOCK, dim]
    scales: tuple[Ref, ...]  # SMEM Float32[buffers, BLOCK], if there is a scale for every token
    arrived: Ref
    released: Ref
    lanes: int  # of a slot that are taken at a time

    @staticmethod
    def scratch(
        buffers: int, dim: int, lanes: int, dtype: jnp.dtype, page_size: int, has_scales: bool
    ) -> tuple[Any, ...]:
        copies = BLOCK // min(page_size, BLOCK)
        shape = buffers, BLOCK, dim
        # Codes of 8 bits are never an operand of a matrix instruction: any layout will do.
        slots = plgpu.SMEM(shape, dtype) if jnp.dtype(dtype).itemsize == 1 else tiled(shape, dtype, lanes)
        return (
            slots,
            (plgpu.SMEM((buffers, BLOCK), jnp.float32),) if has_scales else (),
            plgpu.Barrier(num_arrivals=copies * (1 + has_scales), num_barriers=buffers),
            plgpu.Barrier(num_barriers=buffers),
        )

    @property
    def buffers(self) -> int:
        return self.slots.shape[0]

    def await_room(self, turn: Scalar) -> Scalar:
        """The buffer of a turn, once what was in it has been used."""
        buffer = lax.rem(turn, self.buffers)

        @pl.when(turn >= self.buffers)
        def wait():
            plgpu.barrier_wait(self.released.at[buffer])

        return buffer

    def take(self, turn: Scalar) -> Scalar:
        """The buffer of a turn, once it is full; its tokens past the context hold anything."""
        buffer = lax.rem(turn, self.buffers)
        plgpu.barrier_wait(self.arrived.at[buffer])
        return buffer

    def release(self, buffer: Scalar) -> None:
        """Lets a buffer be filled again: everything in it has been read."""
        plgpu.barrier_arrive(self.released.at[buffer])


@dataclass(frozen=True)
class PageStream:
    """Where the blocks of one item come from."""

    pool: Ref  # GMEM [total_pages, kv_heads, page_size, lanes]
    scales: tuple[Ref, ...]  # GMEM Float32[total_pages, scale_lanes] of the rings that have them
    pages: Ref  # GMEM Int32[rows, width]
    page_offset: Scalar
    attention: Attention
    row: Scalar
    kv_head: Scalar
    queries: Scalar
    context: Scalar

    def page_ids(self, block: Scalar) -> list[Scalar]:
        """The physical page under each copy of a block; where no query sees anything of it, one that is seen."""
        page_size = self.pool.shape[2]
        columns = [self._seen_column(lax.div(token, page_size)) for token in self._tokens(block)]
        return [self.pages[self.row, column] + self.page_offset for column in columns]

    def _seen_column(self, column: Scalar) -> Scalar:
        """The column itself if some query sees a position of that page, or else that of another page."""
        page_size = self.pool.shape[2]
        column = jnp.minimum(column, lax.div(self.context - 1, page_size))
        if self.attention.window is None:
            return column
        window = lax.div(jnp.maximum(self.context - self.queries + 1 - self.attention.window, 0), page_size)
        if not self.attention.kept:
            return jnp.maximum(column, window)
        last_kept = (self.attention.kept - 1) // page_size
        return jnp.where(column >= window, column, jnp.minimum(column, last_kept))

    def send(
        self, ring: Ring, scales: Ref | None, turn: Scalar, block: Scalar, page_ids: list[Scalar], first_lane: int
    ) -> None:
        """Starts the copies of a block, from lane `first_lane` of each slot on, once the ring has room."""
        page_size = self.pool.shape[2]
        tokens, dim = min(page_size, BLOCK), ring.slots.shape[2]
        buffer = ring.await_room(turn)
        for index, (token, page) in enumerate(zip(self._tokens(block), page_ids, strict=True)):
            of_page, of_block = lax.rem(token, page_size), pl.ds(index * tokens, tokens)
            plgpu.copy_gmem_to_smem(
                self.pool.at[page, self.kv_head, pl.ds(of_page, tokens), pl.ds(first_lane, dim)],
                ring.slots.at[buffer, of_block],
                ring.arrived.at[buffer],
            )
            if scales is not None:
                plgpu.copy_gmem_to_smem(
                    scales.at[page, pl.ds(self.kv_head * page_size + of_page, tokens)],
                    ring.scales[0].at[buffer, of_block],
                    ring.arrived.at[buffer],
                )

    def _tokens(self, block: Scalar) -> list[Scalar]:
        """Where in the row each copy of a block begins."""
        tokens = min(self.pool.shape[2], BLOCK)
        return [block * BLOCK + start for start in range(0, BLOCK, tokens)]


@dataclass(frozen=True)
class Worker:
    """The share of one thread block: both of its warpgroups walk through it alike."""

    shares: Ref  # GMEM Int32[workers, 4]
    units: Ref  # GMEM Int32[tiles], and so are the next three
    before: Ref
    kept: Ref
    skipped: Ref
    index: Scalar
    items_per_tile: int

    def walk(self, of_item: Callable[..., Any], state: Any) -> Any:
        """Folds `of_item(tile, within, piece, turn, units, block_of, state) -> state` over the items of the share.

        `within` is the item's number in its tile, `turn` counts the worker's units before it, `units` is [first, end)
        of the item's units, and `block_of` makes a unit a block.
        """
        start, stop = self.shares[self.index, 0], self.shares[self.index, 1]

        def visit(item: Scalar, state: Any) -> Any:
            tile, within = lax.div(item, self.items_per_tile), lax.rem(item, self.items_per_tile)
            units, kept, skipped = self.units[tile], self.kept[tile], self.skipped[tile]
            begin = self.before[tile] + within * units
            first, end = jnp.maximum(start - begin, 0), jnp.minimum(stop - begin, units)

            def block_of(unit: Scalar) -> Scalar:
                return jnp.where(unit < kept, unit, unit + skipped)

            turn = begin + first - start
            return of_item(tile, within, item + self.index, turn, (first, end), block_of, state)

        return lax.fori_loop(self.shares[self.index, 2], self.shares[self.index, 3], visit, state)
