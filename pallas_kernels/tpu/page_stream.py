"""Streams the pages of one tile of queries after another from HBM into a ring of VMEM buffers.

The unit is a block: `pages_per_block` consecutive logical pages of one row, of which those that the tile sees are
copied, one asynchronous copy a page, all heads, K and V together (and one for each of its rows of scales). Blocks
follow each other across tiles, so a tile's first block arrives while the tile before it is still being computed. The
page table stays in HBM and passes through scalar memory in slices of 128 entries, the next one on its way while the
present one is used.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from pallas_kernels.arguments import Attention
from pallas_kernels.tpu.spans import Scalar, Span, down, positions

SLICE = 128  # page table entries brought to scalar memory at a time: one row of a tile of int32 in HBM
TABLE_SLICES = 2  # in scalar memory: one in use, one arriving
HBM_TILE_ROWS = 8  # bfloat16 lies in HBM in tiles of 8 rows of 128 lanes, on every chip

# Where a stream is, kept in scalar memory from one grid step to the next.
NEXT_TILE, NEXT_BLOCK, BLOCKS_STARTED, BLOCKS_TAKEN, SLICES_TAKEN, SLICE_IN_USE = range(6)

Ref = Any  # a Pallas reference


def in_tiles(
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
) -> Shaped[Array, "total_pages kv_heads tiles rows lanes"]:
    """The same bytes, with the slots of a page in as many rows as a tile has in HBM.

    Left to itself Mosaic lays a ring of bfloat16 out in tiles of 16 rows on tpu7x. The copy of a page is a strided one
    then, whose descriptor is written word by word: 11 bundles where a plain copy takes 4 or 5. Rows in eights get
    tiles of 8 in both memories.
    """
    total_pages, kv_heads, page_size, lanes = pool.shape
    rows = HBM_TILE_ROWS if pool.dtype == jnp.bfloat16 else page_size
    return pool.reshape(total_pages, kv_heads, page_size // rows, rows, lanes)


@dataclass(frozen=True)
class TileRefs:
    """The tiles, and the share of their blocks that one core reads. All in scalar memory."""

    row: Ref  # Int32[tiles]
    queries: Ref  # Int32[tiles]
    context: Ref  # Int32[tiles]
    shares: Ref  # Int32[cores, 4], see `cores.shares`
    core: Scalar
    attention: Attention

    @property
    def first(self) -> Scalar:
        return self.shares[self.core, 0]

    @property
    def end(self) -> Scalar:
        return self.shares[self.core, 1]

    def positions(self, tile: Scalar) -> Span:
        """What the tile sees, whichever core reads it."""
        return positions(self.queries[tile], self.context[tile], self.attention)

    def blocks(self, tile: Scalar, block_tokens: int) -> tuple[Scalar, Span]:
        """The blocks of a tile that this core reads: the first of them, and those from it on."""
        span = self.positions(tile).in_units_of(block_tokens)
        start = jnp.where(tile == self.first, jnp.maximum(self.shares[self.core, 2], span.start), span.start)
        end = jnp.where(tile == self.end - 1, jnp.minimum(self.shares[self.core, 3], span.end), span.end)
        return start, Span(span.kept, span.first, end)


@dataclass(frozen=True)
class PageStream:
    """The blocks of a core's tiles, in order. All its state lives in the references it holds.

    Call `open` once, then `start_next` and `take` for each block of each tile.
    """

    tiles: TileRefs
    pages: Ref  # HBM Int32[rows, width], width a multiple of SLICE
    page_offset: Ref  # SMEM Int32[1]
    sources: tuple[Ref, ...]  # HBM [total_pages, …]: the pool as `in_tiles` has it, and pools of scales
    # What `scratch` asks for, in its order:
    rings: tuple[Ref, ...]  # of each source, [buffers, pages_per_block, …]
    slices: Ref
    position: Ref
    block_arrived: Ref
    slice_arrived: Ref

    @staticmethod
    def scratch(buffers: int, pages_per_block: int, sources: tuple[Any, ...]) -> list[Any]:
        """The scratch memory of a stream of `sources` (anything with a shape and a dtype)."""
        return [
            tuple(pltpu.VMEM((buffers, pages_per_block, *source.shape[1:]), source.dtype) for source in sources),
            pltpu.SMEM((TABLE_SLICES * SLICE,), jnp.int32),
            pltpu.SMEM((6,), jnp.int32),
            pltpu.SemaphoreType.DMA((buffers,)),
            pltpu.SemaphoreType.DMA((TABLE_SLICES,)),
        ]

    @property
    def page_size(self) -> int:
        _, _, tiles, rows, _ = self.sources[0].shape
        return tiles * rows

    @property
    def buffers(self) -> int:
        return self.rings[0].shape[0]

    @property
    def pages_per_block(self) -> int:
        return self.rings[0].shape[1]

    @property
    def block_tokens(self) -> int:
        return self.pages_per_block * self.page_size

    @property
    def blocks_per_slice(self) -> int:
        return SLICE // self.pages_per_block

    def blocks(self, tile: Scalar) -> tuple[Scalar, Span]:
        """The blocks of a tile that this core reads: the first of them, and those from it on."""
        return self.tiles.blocks(tile, self.block_tokens)

    def open(self) -> None:
        """Begins the stream and fills the ring but for the buffer that `start_next` fills."""
        tile, block = self._first_of(self.tiles.first)
        self.position[NEXT_TILE] = tile
        self.position[NEXT_BLOCK] = block
        for word in (BLOCKS_STARTED, BLOCKS_TAKEN, SLICES_TAKEN):
            self.position[word] = 0
        self.position[SLICE_IN_USE] = -1

        @pl.when(tile < self.tiles.end)
        def send_for_first_slice():
            self._slice_copy(tile, self._slice_of(block), 0).start()

        for _ in range(self.buffers - 1):
            self.start_next()

    def start_next(self) -> None:
        """Starts the copies of the stream's next block, if one is left, into the buffer that was taken first."""
        tile, block = self.position[NEXT_TILE], self.position[NEXT_BLOCK]

        @pl.when(tile < self.tiles.end)
        def start_block():
            slice_ = self._slice_of(block)

            @pl.when(slice_ != self.position[SLICE_IN_USE])
            def enter_slice():
                self._take_slice(tile, slice_)

            buffer = self._buffer(self.position[BLOCKS_STARTED])
            slice_buffer = (self.position[SLICES_TAKEN] - 1) & (TABLE_SLICES - 1)
            first_entry = slice_buffer * SLICE + (block & (self.blocks_per_slice - 1)) * self.pages_per_block

            page_offset = self.page_offset[0]

            def start(index):
                page = self.slices[first_entry + index] + page_offset
                for copy in self._page_copies(page, buffer, index):
                    copy.start()

            self._for_pages(tile, block, start)
            self.position[BLOCKS_STARTED] += 1
            _, span = self.blocks(tile)
            following = span.after(block)
            self.position[NEXT_BLOCK] = following

            @pl.when(following >= span.end)
            def leave_tile():
                next_tile, next_block = self._first_of(tile + 1)
                self.position[NEXT_TILE] = next_tile
                self.position[NEXT_BLOCK] = next_block
                self.position[SLICE_IN_USE] = -1

    def take(self, tile: Scalar, block: Scalar) -> tuple[Ref, ...]:
        """Waits for a block and returns the buffers it lies in: of each source, [pages_per_block, …].

        The buffers are the caller's until the next `start_next`. Slots of pages that the tile does not see hold
        anything.
        """
        buffer = self._buffer(self.position[BLOCKS_TAKEN])
        self.position[BLOCKS_TAKEN] += 1
        self._wait(tile, block, buffer)
        return tuple(ring.at[buffer] for ring in self.rings)

    def _wait(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        # A wait counts bytes: whichever page is named, and a whole block at once if all its pages come.
        def wait_for_page(index):
            for copy in self._page_copies(0, buffer, index):
                copy.wait()

        def wait_for_block():
            for ring in self.rings:
                whole = ring.at[buffer]
                pltpu.make_async_copy(whole, whole, self.block_arrived.at[buffer]).wait()

        self._for_pages(tile, block, wait_for_page, wait_for_block)

    def _for_pages(self, tile: Scalar, block: Scalar, act: Any, act_on_all: Any = None) -> None:
        """`act(index)` for each page of a block that the tile sees; if it sees all, `act_on_all()` if given."""
        span = self.tiles.positions(tile).in_units_of(self.page_size)
        start = block * self.pages_per_block
        end = start + self.pages_per_block
        whole = (jnp.maximum(span.first, 0) <= start) & (end <= span.end)

        @pl.when(whole)
        def all_pages():
            if act_on_all is not None:
                act_on_all()
            else:
                for index in range(self.pages_per_block):
                    act(index)

        @pl.when(~whole)
        def some_pages():
            def range_of_pages(lower, upper):
                lax.fori_loop(lower - start, jnp.minimum(upper, end) - start, lambda index, _: act(index), None)

            range_of_pages(start, span.kept)
            range_of_pages(jnp.maximum(start, jnp.maximum(span.first, span.kept)), span.end)

    def _page_copies(self, page: Scalar, buffer: Scalar, index: Scalar) -> list[Any]:
        return [
            pltpu.make_async_copy(source.at[page], ring.at[buffer, index], self.block_arrived.at[buffer])
            for source, ring in zip(self.sources, self.rings, strict=True)
        ]

    def _take_slice(self, tile: Scalar, slice_: Scalar) -> None:
        """Waits for the slice that is on its way, which is this one, and sends for the one after it."""
        taken = self.position[SLICES_TAKEN]
        self._slice_copy(tile, slice_, taken & (TABLE_SLICES - 1)).wait()
        self.position[SLICES_TAKEN] = taken + 1
        self.position[SLICE_IN_USE] = slice_

        slices = self.blocks(tile)[1].in_units_of(self.blocks_per_slice)
        following = slices.after(slice_)

        def of_next_tile():
            next_tile, next_block = self._first_of(tile + 1)
            return next_tile, self._slice_of(next_block)

        next_tile, next_slice = lax.cond(following < slices.end, lambda: (tile, following), of_next_tile)

        @pl.when(next_tile < self.tiles.end)
        def send_for_next_slice():
            self._slice_copy(next_tile, next_slice, (taken + 1) & (TABLE_SLICES - 1)).start()

    def _slice_copy(self, tile: Scalar, slice_: Scalar, buffer: Scalar) -> Any:
        entries = pl.ds(pl.multiple_of(slice_ * SLICE, SLICE), SLICE)
        half = pl.ds(pl.multiple_of(buffer * SLICE, SLICE), SLICE)
        return pltpu.make_async_copy(
            self.pages.at[self.tiles.row[tile], entries], self.slices.at[half], self.slice_arrived.at[buffer]
        )

    def _slice_of(self, block: Scalar) -> Scalar:
        return down(block, self.blocks_per_slice)

    def _buffer(self, block: Scalar) -> Scalar:
        return block & (self.buffers - 1)

    def _first_of(self, tile: Scalar) -> tuple[Scalar, Scalar]:
        """The first tile at or after `tile` that this core reads blocks of, and the first block; or `end`, and any."""

        def idle(tile):
            start, span = self.blocks(jnp.minimum(tile, self.tiles.end - 1))
            return (tile < self.tiles.end) & (start >= span.end)

        tile = lax.while_loop(idle, lambda tile: tile + 1, tile)
        start, _ = self.blocks(jnp.maximum(jnp.minimum(tile, self.tiles.end - 1), 0))
        return tile, start
