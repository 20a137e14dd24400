"""Streams the pages of one query from GPU memory through a ring of shared-memory buffers.

The unit is a block of BLOCK consecutive tokens of one KV head, K and V together, brought by bulk asynchronous copies:
one for each page in it, or for the part of a page when pages are longer. All buffers are on their way before the first
is used, and a buffer is sent for again as soon as it has been used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.layouts import tiled

BLOCK = 64  # tokens of one step: what one warpgroup's matrix instruction takes as rows

Ref = Any  # a Pallas reference
Scalar = Any  # a traced int32, or an int


@dataclass(frozen=True)
class PageStream:
    """The blocks [first, end) of a query's context. Call `open` once, then `fold`.

    A context is shared out between `splits` streams in whole blocks; the last ones may have none.
    """

    pool: Ref  # GMEM [total_pages, kv_heads, page_size, lanes]
    pages: Ref  # GMEM Int32[rows, width]
    kv_head: Scalar
    row: Scalar
    context: Scalar
    page_offset: Scalar
    split: Scalar
    splits: int
    # What `scratch` asks for, in its order:
    ring: Ref
    arrived: Ref

    @staticmethod
    def scratch(buffers: int, page_size: int, lanes: int, dtype: jnp.dtype) -> list[Any]:
        """The scratch memory of a stream with a ring of `buffers` blocks [BLOCK, lanes]."""
        copies = BLOCK // min(page_size, BLOCK)
        return [tiled((buffers, BLOCK, lanes), dtype), plgpu.Barrier(num_arrivals=copies, num_barriers=buffers)]

    @property
    def buffers(self) -> int:
        return self.ring.shape[0]

    @property
    def first(self) -> Scalar:
        return self.split * self._share

    @property
    def end(self) -> Scalar:
        return jnp.minimum(self.first + self._share, self._blocks)

    def open(self) -> None:
        """Sends for the first blocks, as many as there are buffers. All page ids are read before any is waited for."""
        ahead = [self._page_ids(self.first + buffer) for buffer in range(self.buffers)]
        for buffer, page_ids in enumerate(ahead):
            self._send(self.first + buffer, buffer, page_ids)

    def fold(self, step: Callable[[Scalar, Ref, Any], Any], state: Any) -> Any:
        """Folds `step(block, buffer, state) -> state` over the blocks; the buffer is step's until it returns.

        A buffer is [BLOCK, lanes]; its tokens at or past the context hold anything. A step that reads or writes it
        otherwise than by matrix instructions calls `plgpu.commit_smem()` when it has.
        """

        def take(block, state):
            # Read now, used after the step, whose arithmetic hides the latency.
            page_ids = self._page_ids(block + self.buffers)
            buffer = lax.rem(block - self.first, self.buffers)
            plgpu.barrier_wait(self.arrived.at[buffer])
            state = step(block, self.ring.at[buffer], state)
            self._send(block + self.buffers, buffer, page_ids)
            return state

        return lax.fori_loop(self.first, self.end, take, state)

    @property
    def _blocks(self) -> Scalar:
        return pl.cdiv(self.context, BLOCK)

    @property
    def _share(self) -> Scalar:
        return pl.cdiv(self._blocks, self.splits)

    def _chunks(self, block: Scalar) -> list[Scalar]:
        """Where in the context each copy of a block begins."""
        tokens = min(self.pool.shape[2], BLOCK)
        return [block * BLOCK + start for start in range(0, BLOCK, tokens)]

    def _page_ids(self, block: Scalar) -> list[Scalar]:
        """The physical page under each copy of a block. Past the context it is that of the last mapped page."""
        rows, _ = self.pages.shape
        page_size = self.pool.shape[2]
        # Also for an empty query, whose row may be out of range, some entry of the table is read, and not used.
        row = jnp.minimum(self.row, rows - 1)
        last = lax.div(jnp.maximum(self.context - 1, 0), page_size)
        columns = [jnp.minimum(lax.div(token, page_size), last) for token in self._chunks(block)]
        return [self.pages[row, column] + self.page_offset for column in columns]

    def _send(self, block: Scalar, buffer: Scalar, page_ids: list[Scalar]) -> None:
        """Starts the copies of a block, if it is one of this stream's."""
        page_size = self.pool.shape[2]
        tokens = min(page_size, BLOCK)

        @pl.when(block < self.end)
        def start():
            for index, (token, page) in enumerate(zip(self._chunks(block), page_ids, strict=True)):
                plgpu.copy_gmem_to_smem(
                    self.pool.at[page, self.kv_head, pl.ds(lax.rem(token, page_size), tokens)],
                    self.ring.at[buffer, pl.ds(index * tokens, tokens)],
                    self.arrived.at[buffer],
                )


def visible(block: Scalar, context: Scalar, shape: tuple[int, ...], axis: int, layout: Any) -> Any:
    """Bool[shape]: whether the tokens of a block, laid along `axis`, are in the context."""
    return block * BLOCK + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) < context
