"""Streams the blocks of one tile of queries after another from HBM into a ring of VMEM buffers.

A block is `pages_per_block` consecutive logical pages of one row, of which those that the tile sees are copied, all
heads, K and V together (and their rows of scales). Blocks follow each other across tiles, so a tile's first block
arrives while the tile before it is still being computed. Where the pages of a row are is what the kinds of stream
differ in: `page_stream` has a table of page ids, `extent_stream` lists of runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from pallas_kernels.arguments import Attention
from pallas_kernels.tpu.spans import Scalar, Span, positions
from pallas_kernels.tpu.table_slices import TableSlices

# Where a stream is, kept in scalar memory from one grid step to the next.
NEXT_TILE, NEXT_BLOCK, BLOCKS_STARTED, BLOCKS_TAKEN = range(4)

LANES = 128
HBM_TILE_ROWS = 8  # bfloat16 lies in HBM in tiles of 8 rows of 128 lanes, on every chip

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
class BlockStream(ABC):
    """The blocks of a core's tiles, in order. All its state lives in the references it holds.

    Call `open` once, then `start_next` and `take` for each block of each tile.
    """

    tiles: TileRefs
    tables: tuple[Ref, ...]  # HBM Int32[rows, width], width a multiple of SLICE: where the pages of rows are
    lengths: tuple[Ref, ...]  # SMEM Int32[rows]: entries of a row in the tables, if the kind of stream asks for it
    page_offset: Ref  # SMEM Int32[1]
    sources: tuple[Ref, ...]  # HBM [total_pages, …]: the pool as `in_tiles` has it, and pools of scales
    # What `scratch` asks for, in its order:
    rings: tuple[Ref, ...]  # of each source, [buffers, pages_per_block, …]
    position: Ref
    block_arrived: Ref
    slice_refs: list[Ref]

    position_words: ClassVar[int] = 4  # of scalar memory; a kind of stream may keep more than those named above

    @classmethod
    def scratch(cls, buffers: int, pages_per_block: int, sources: tuple[Any, ...], tables: int) -> list[Any]:
        """The scratch memory of a stream of `sources` (anything with a shape and a dtype)."""
        return [
            tuple(pltpu.VMEM((buffers, pages_per_block, *source.shape[1:]), source.dtype) for source in sources),
            pltpu.SMEM((cls.position_words,), jnp.int32),
            pltpu.SemaphoreType.DMA((buffers,)),
            TableSlices.scratch(tables),
        ]

    @staticmethod
    def pages_are_adjacent(source: Ref) -> bool:
        """Whether the pages of a source lie one after the other in HBM, so that several can be one copy.

        Arrays lie there in tiles of 8 rows by 128 lanes: the pages of a pool are whole tiles, but where pages are rows,
        as those of scales, and wider than a tile, eight of them are interleaved.
        """
        return len(source.shape) > 2 or source.shape[1] == LANES

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
    def slices(self) -> TableSlices:
        return TableSlices(self.tables, *self.slice_refs)

    def blocks(self, tile: Scalar) -> tuple[Scalar, Span]:
        """The blocks of a tile that this core reads: the first of them, and those from it on."""
        return self.tiles.blocks(tile, self.block_tokens)

    def pages(self, tile: Scalar) -> Span:
        """The logical pages that the tile sees, whichever core reads them."""
        return self.tiles.positions(tile).in_units_of(self.page_size)

    def open(self) -> None:
        """Begins the stream and fills the ring but for the buffer that `start_next` fills."""
        tile, block = self._first_of(self.tiles.first)
        self.position[NEXT_TILE] = tile
        self.position[NEXT_BLOCK] = block
        for word in (BLOCKS_STARTED, BLOCKS_TAKEN):
            self.position[word] = 0
        self.slices.open()
        self._enter_tile()

        @pl.when(tile < self.tiles.end)
        def send_for_first_slice():
            self.slices.send_for(self.tiles.row[tile], self._first_slice(block))

        for _ in range(self.buffers - 1):
            self.start_next()

    def start_next(self) -> None:
        """Starts the copies of the stream's next block, if one is left, into the buffer that was taken first."""
        tile, block = self.position[NEXT_TILE], self.position[NEXT_BLOCK]

        @pl.when(tile < self.tiles.end)
        def start_block():
            self._start_copies(tile, block, self._buffer(self.position[BLOCKS_STARTED]))
            self.position[BLOCKS_STARTED] += 1
            _, span = self.blocks(tile)
            following = span.after(block)
            self.position[NEXT_BLOCK] = following

            @pl.when(following >= span.end)
            def leave_tile():
                next_tile, next_block = self._first_of(tile + 1)
                self.position[NEXT_TILE] = next_tile
                self.position[NEXT_BLOCK] = next_block
                self.slices.leave()
                self._enter_tile()

    def take(self, tile: Scalar, block: Scalar) -> tuple[Ref, ...]:
        """Waits for a block and returns the buffers it lies in: of each source, [pages_per_block, …].

        The buffers are the caller's until the next `start_next`. Slots of pages that the tile does not see hold
        anything.
        """
        buffer = self._buffer(self.position[BLOCKS_TAKEN])
        self.position[BLOCKS_TAKEN] += 1
        self._wait(tile, block, buffer)
        return tuple(ring.at[buffer] for ring in self.rings)

    @abstractmethod
    def _start_copies(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        """Starts the copies of the pages of a block that the tile sees. Blocks of a tile come in order."""

    @abstractmethod
    def _first_slice(self, block: Scalar) -> Scalar:
        """The slice of the tables from which the copies of a tile can be started whose first block this is."""

    @abstractmethod
    def _following_slice(self, tile: Scalar, slice_: Scalar) -> tuple[Scalar, Scalar]:
        """The slice that the tile needs after the one in use, and whether it needs one."""

    def _enter_tile(self) -> None:  # noqa: B027, most kinds of stream keep nothing
        """Forgets what is kept of a tile. The next block is the first of one."""

    def _take_slice(self, tile: Scalar, slice_: Scalar) -> None:
        """Waits for the slice that is on its way, which is this one, and sends for the one after it."""
        self.slices.take(self.tiles.row[tile], slice_)
        following, is_needed = self._following_slice(tile, slice_)

        def of_next_tile():
            next_tile, next_block = self._first_of(tile + 1)
            return next_tile, self._first_slice(next_block)

        next_tile, next_slice = lax.cond(is_needed, lambda: (tile, following), of_next_tile)

        @pl.when(next_tile < self.tiles.end)
        def send_for_next_slice():
            self.slices.send_for(self.tiles.row[next_tile], next_slice)

    def _start(self, page: Scalar, buffer: Scalar, index: Scalar, count: Scalar) -> None:
        """Starts the copies of `count` physical pages from `page` on to the places from `index` on."""
        for source, ring in zip(self.sources, self.rings, strict=True):
            if self.pages_are_adjacent(source):
                self._start_copy(source.at[pl.ds(page, count)], ring.at[buffer, pl.ds(index, count)], buffer)
                continue

            def start_row(each, source=source, ring=ring):
                self._start_copy(source.at[page + each], ring.at[buffer, index + each], buffer)

            _for_each(count, start_row)

    def _start_copy(self, source: Ref, place: Ref, buffer: Scalar) -> None:
        pltpu.make_async_copy(source, place, self.block_arrived.at[buffer]).start()

    def _wait(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        # A wait counts bytes, wherever they come from: of a whole block at once if all its pages come.
        def wait_for(place):
            pltpu.make_async_copy(place, place, self.block_arrived.at[buffer]).wait()

        def wait_for_page(index):
            for ring in self.rings:
                wait_for(ring.at[buffer, index])

        def wait_for_block():
            for ring in self.rings:
                wait_for(ring.at[buffer])

        self._for_pages(tile, block, wait_for_page, wait_for_block)

    def _for_pages(self, tile: Scalar, block: Scalar, act: Any, act_on_all: Any) -> None:
        """`act(index)` for each page of a block that the tile sees; if it sees all, `act_on_all()`."""
        span = self.pages(tile)
        start, end = self._pages_of_block(block)
        whole = self._sees_all(span, start, end)
        pl.when(whole)(act_on_all)

        @pl.when(~whole)
        def some_pages():
            def range_of_pages(lower, upper):
                lax.fori_loop(lower - start, jnp.minimum(upper, end) - start, lambda index, _: act(index), None)

            range_of_pages(start, span.kept)
            range_of_pages(jnp.maximum(start, jnp.maximum(span.first, span.kept)), span.end)

    def _pages_of_block(self, block: Scalar) -> tuple[Scalar, Scalar]:
        start = block * self.pages_per_block
        return start, start + self.pages_per_block

    def _sees_all(self, pages: Span, start: Scalar, end: Scalar) -> Scalar:
        return (jnp.maximum(pages.first, 0) <= start) & (end <= pages.end)

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


def _for_each(count: Scalar, act: Callable[[Scalar], None]) -> None:
    """`act` on each number below `count`, in a loop unless it is static."""
    if isinstance(count, int):
        for each in range(count):
            act(each)
    else:
        lax.fori_loop(0, count, lambda each, _: act(each), None)
