"""Streams the pages of one query after another from HBM into a ring of VMEM buffers.

The unit is a block: up to `pages_per_block` consecutive logical pages of one query, one asynchronous copy a page, all
heads, K and V together. Blocks follow each other across queries, so a query's first block arrives while the query
before it is still being computed. The page table stays in HBM and passes through scalar memory in slices of 128
entries, the next one on its way while the present one is used.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SLICE = 128  # page table entries brought to scalar memory at a time: one row of a tile of int32 in HBM
TABLE_SLICES = 2  # in scalar memory: one in use, one arriving

# Where a stream is, kept in scalar memory from one grid step to the next.
NEXT_QUERY, NEXT_BLOCK, BLOCKS_STARTED, BLOCKS_TAKEN, SLICES_TAKEN = range(5)

Ref = Any  # a Pallas reference
Scalar = Any  # a traced int32, or an int


@dataclass(frozen=True)
class PageStream:
    """The blocks of the queries before `end`, in order. All its state lives in the references it holds.

    Call `open` once, then `start_next` and `take` for each block of each query.
    """

    pool: Ref  # HBM [total_pages, kv_heads, page_size, lanes]
    pages: Ref  # HBM Int32[rows, width], width a multiple of SLICE
    row: Ref  # SMEM Int32[queries]
    context: Ref  # SMEM Int32[queries]
    page_offset: Ref  # SMEM Int32[1]
    end: Scalar
    # What `scratch` asks for, in its order:
    ring: Ref
    slices: Ref
    position: Ref
    block_arrived: Ref
    slice_arrived: Ref

    @staticmethod
    def scratch(buffers: int, block_shape: tuple[int, int, int], dtype: jnp.dtype) -> list[Any]:
        """The scratch memory of a stream with a ring of `buffers` blocks [kv_heads, block_tokens, lanes]."""
        return [
            pltpu.VMEM((buffers, *block_shape), dtype),
            pltpu.SMEM((TABLE_SLICES, SLICE), jnp.int32),
            pltpu.SMEM((5,), jnp.int32),
            pltpu.SemaphoreType.DMA((buffers,)),
            pltpu.SemaphoreType.DMA((TABLE_SLICES,)),
        ]

    @property
    def page_size(self) -> int:
        return self.pool.shape[2]

    @property
    def block_tokens(self) -> int:
        return self.ring.shape[2]

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_size

    def blocks(self, query: Scalar) -> Scalar:
        """How many blocks the context of a query takes."""
        return pl.cdiv(self.context[query], self.block_tokens)

    def open(self, first: Scalar) -> None:
        """Begins the stream at query `first` and fills the ring but for the buffer that `start_next` fills."""
        query = self._busy_from(first)
        self.position[NEXT_QUERY] = query
        for word in (NEXT_BLOCK, BLOCKS_STARTED, BLOCKS_TAKEN, SLICES_TAKEN):
            self.position[word] = 0

        @pl.when(query < self.end)
        def send_for_first_slice():
            self._slice_copy(query, 0, 0).start()

        for _ in range(self.ring.shape[0] - 1):
            self.start_next()

    def start_next(self) -> None:
        """Starts the copies of the stream's next block, if one is left, into the buffer that was taken first."""
        query, block = self.position[NEXT_QUERY], self.position[NEXT_BLOCK]
        blocks_per_slice = SLICE // self.pages_per_block

        @pl.when(query < self.end)
        def start_block():
            @pl.when(lax.rem(block, blocks_per_slice) == 0)
            def enter_slice():
                self._take_slice(query, lax.div(block, blocks_per_slice))

            buffer = lax.rem(self.position[BLOCKS_STARTED], self.ring.shape[0])
            slice_buffer = lax.rem(self.position[SLICES_TAKEN] - 1, TABLE_SLICES)
            first_entry = lax.rem(block, blocks_per_slice) * self.pages_per_block

            def start(index, _):
                page = self.slices[slice_buffer, first_entry + index] + self.page_offset[0]
                self._page_copy(page, buffer, index).start()

            lax.fori_loop(0, self._pages_in(query, block), start, None)
            self.position[BLOCKS_STARTED] += 1
            next_query, next_block = self._successor(query, block, self.blocks(query))
            self.position[NEXT_QUERY] = next_query
            self.position[NEXT_BLOCK] = next_block

    def take(self, query: Scalar, block: Scalar) -> Ref:
        """Waits for a block and returns the buffer [kv_heads, block_tokens, lanes] it lies in.

        The buffer is the caller's until the next `start_next`. Slots past the query's context hold anything.
        """
        buffer = lax.rem(self.position[BLOCKS_TAKEN], self.ring.shape[0])
        self.position[BLOCKS_TAKEN] += 1
        self._wait(buffer, self._pages_in(query, block))
        return self.ring.at[buffer]

    def _wait(self, buffer: Scalar, pages: Scalar) -> None:
        def wait(index, _):
            self._page_copy(0, buffer, index).wait()  # any page will do: a wait only counts bytes

        lax.fori_loop(0, pages, wait, None)

    def _pages_in(self, query: Scalar, block: Scalar) -> Scalar:
        pages = pl.cdiv(self.context[query], self.page_size)
        return jnp.minimum(pages - block * self.pages_per_block, self.pages_per_block)

    def _page_copy(self, page: Scalar, buffer: Scalar, index: Scalar) -> Any:
        slots = pl.ds(pl.multiple_of(index * self.page_size, self.page_size), self.page_size)
        return pltpu.make_async_copy(
            self.pool.at[page], self.ring.at[buffer, :, slots, :], self.block_arrived.at[buffer]
        )

    def _take_slice(self, query: Scalar, slice_: Scalar) -> None:
        """Waits for the slice that is on its way, which is this one, and sends for the one after it."""
        taken = self.position[SLICES_TAKEN]
        self._slice_copy(query, slice_, lax.rem(taken, TABLE_SLICES)).wait()
        self.position[SLICES_TAKEN] = taken + 1

        slices = pl.cdiv(self.context[query], SLICE * self.page_size)
        next_query, next_slice = self._successor(query, slice_, slices)

        @pl.when(next_query < self.end)
        def send_for_next_slice():
            self._slice_copy(next_query, next_slice, lax.rem(taken + 1, TABLE_SLICES)).start()

    def _slice_copy(self, query: Scalar, slice_: Scalar, buffer: Scalar) -> Any:
        entries = pl.ds(pl.multiple_of(slice_ * SLICE, SLICE), SLICE)
        return pltpu.make_async_copy(
            self.pages.at[self.row[query], entries], self.slices.at[buffer], self.slice_arrived.at[buffer]
        )

    def _successor(self, query: Scalar, item: Scalar, items: Scalar) -> tuple[Scalar, Scalar]:
        """What follows item `item` of a query that has `items`: its next one, or the first of the next busy query."""
        more = item + 1 < items
        next_query = lax.cond(more, lambda: query, lambda: self._busy_from(query + 1))
        return next_query, jnp.where(more, item + 1, 0)

    def _busy_from(self, query: Scalar) -> Scalar:
        """The first query at or after `query` that has a context, or `end`."""
        return lax.while_loop(
            lambda query: (query < self.end) & (self.context[jnp.minimum(query, self.end - 1)] == 0),
            lambda query: query + 1,
            query,
        )
