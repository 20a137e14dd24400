"""The stream that finds the pages of a row in a page table and copies them one at a time."""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from pallas_kernels.tpu.block_stream import BlockStream
from pallas_kernels.tpu.spans import Scalar, down
from pallas_kernels.tpu.table_slices import SLICE


@dataclass(frozen=True)
class PageStream(BlockStream):
    """`tables` is the page table alone: the physical page of each logical page, before `page_offset` is added."""

    @property
    def blocks_per_slice(self) -> int:
        return SLICE // self.pages_per_block

    def _start_copies(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        slice_ = self._first_slice(block)

        @pl.when(slice_ != self.slices.in_use)
        def enter_slice():
            self._take_slice(tile, slice_)

        (ids,) = self.slices.buffers
        first_entry = self.slices.first_entry + (block & (self.blocks_per_slice - 1)) * self.pages_per_block
        page_offset = self.page_offset[0]

        def start(index: Scalar) -> None:
            self._start(ids[first_entry + index] + page_offset, buffer, index, 1)

        def start_all() -> None:
            for index in range(self.pages_per_block):
                start(index)

        self._for_pages(tile, block, start, start_all)

    def _first_slice(self, block: Scalar) -> Scalar:
        return down(block, self.blocks_per_slice)

    def _following_slice(self, tile: Scalar, slice_: Scalar) -> tuple[Scalar, Scalar]:
        slices = self.blocks(tile)[1].in_units_of(self.blocks_per_slice)
        following = slices.after(slice_)
        return following, following < slices.end
