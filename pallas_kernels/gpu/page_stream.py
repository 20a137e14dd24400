"""Keys and values in pages: one bulk asynchronous copy for each page of a block, or part of a page."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.ring import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import BLOCK


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of all layers, and which belong to which row: arrays, or in a kernel references to them."""

    pool: Ref  # [total_pages, kv_heads, page_size, lanes]
    key_scales: Ref | None  # Float32[total_pages, scale_lanes], and so are the next
    value_scales: Ref | None
    pages: Ref  # Int32[rows, width]
    page_offset: Ref  # Int32[1]

    @property
    def memory(self) -> Ref:
        """What keys and values are copied from."""
        return self.pool

    @property
    def rows(self) -> int:
        return self.pages.shape[0]

    @property
    def copies(self) -> int:
        """Copies that bring the keys, or the values, of one block."""
        return BLOCK // min(self.pool.shape[2], BLOCK)

    def stream(
        self, attention: Attention, row: Scalar, kv_head: Scalar, queries: Scalar, context: Scalar
    ) -> "PageStream":
        """Where the blocks of an item come from."""
        return PageStream(self, attention, row, kv_head, queries, context)


@dataclass(frozen=True)
class PageStream:
    """The blocks of one item: a row and KV head."""

    source: Pages  # of references
    attention: Attention
    row: Scalar
    kv_head: Scalar
    queries: Scalar
    context: Scalar

    def places(self, block: Scalar) -> list[Scalar]:
        """The physical page under each copy of a block; where no query sees anything of it, one that is seen."""
        page_size = self.source.pool.shape[2]
        columns = [self._seen_column(lax.div(token, page_size)) for token in self._tokens(block)]
        return [self.source.pages[self.row, column] + self.source.page_offset[0] for column in columns]

    def _seen_column(self, column: Scalar) -> Scalar:
        """The column itself if some query sees a position of that page, or else that of another page."""
        page_size = self.source.pool.shape[2]
        column = jnp.minimum(column, lax.div(self.context - 1, page_size))
        if self.attention.window is None:
            return column
        window = lax.div(jnp.maximum(self.context - self.queries + 1 - self.attention.window, 0), page_size)
        if not self.attention.kept:
            return jnp.maximum(column, window)
        last_kept = (self.attention.kept - 1) // page_size
        return jnp.where(column >= window, column, jnp.minimum(column, last_kept))

    def send_keys(self, ring: Ring, turn: Scalar, block: Scalar, places: list[Scalar]) -> None:
        """Starts the copies of a block's keys, once the ring has room."""
        self._send(ring, self.source.key_scales, turn, block, places, 0)

    def send_values(self, ring: Ring, turn: Scalar, block: Scalar, places: list[Scalar], key_dim: int) -> None:
        """Starts the copies of a block's values, which follow `key_dim` lanes of keys, once the ring has room."""
        self._send(ring, self.source.value_scales, turn, block, places, key_dim)

    def _send(
        self, ring: Ring, scales: Ref | None, turn: Scalar, block: Scalar, places: list[Scalar], first_lane: int
    ) -> None:
        page_size = self.source.pool.shape[2]
        tokens, dim = min(page_size, BLOCK), ring.slots.shape[2]
        buffer = ring.await_room(turn)
        for index, (token, page) in enumerate(zip(self._tokens(block), places, strict=True)):
            of_page, of_block = lax.rem(token, page_size), pl.ds(index * tokens, tokens)
            plgpu.copy_gmem_to_smem(
                self.source.pool.at[page, self.kv_head, pl.ds(of_page, tokens), pl.ds(first_lane, dim)],
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
        tokens = min(self.source.pool.shape[2], BLOCK)
        return [block * BLOCK + start for start in range(0, BLOCK, tokens)]
