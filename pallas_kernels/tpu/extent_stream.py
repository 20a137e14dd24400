"""The stream that finds the pages of a row in a list of runs and copies a block that lies in one run at once.

A run is a stretch of logical pages that are physically adjacent too. The runs of a row are walked from its first, as
far as the blocks get; the one that was reached is kept in scalar memory, so that a block inside of it asks the lists
nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.block_stream import BlockStream
from pallas_kernels.tpu.spans import Scalar
from pallas_kernels.tpu.table_slices import SLICE

# The run that was reached, among the words of `position`: which it is, the logical page at which it ends, and what to
# add to its logical pages to get the physical ones.
RUN, RUN_END, RUN_SHIFT = range(BlockStream.position_words, BlockStream.position_words + 3)


@dataclass(frozen=True)
class ExtentStream(BlockStream):
    """`tables`: the physical page where a run begins, and the logical one where it ends. `lengths`: `num_runs`."""

    position_words: ClassVar[int] = BlockStream.position_words + 3

    def _start_copies(self, tile: Scalar, block: Scalar, buffer: Scalar) -> None:
        pages = self.pages(tile)
        start, end = self._pages_of_block(block)
        in_run = self._sees_all(pages, start, end) & (end <= self.position[RUN_END])

        @pl.when(in_run)
        def start_block():
            self._start(self.position[RUN_SHIFT] + start, buffer, 0, self.pages_per_block)

        @pl.when(~in_run)
        def start_pieces():
            def start_piece(page):
                run_end, shift = self._reach(tile, page)
                seen_until = jnp.where(page < pages.kept, pages.kept, pages.end)
                until = jnp.minimum(jnp.minimum(seen_until, run_end), end)
                self._start(shift + page, buffer, page - start, until - page)
                return pages.after(until - 1)

            first, last = pages.after(start - 1), jnp.minimum(pages.end, end)
            lax.while_loop(lambda page: page < last, start_piece, first)

    def _enter_tile(self) -> None:
        self.position[RUN] = -1
        self.position[RUN_END] = 0

    def _reach(self, tile: Scalar, page: Scalar) -> tuple[Scalar, Scalar]:
        """Walks to the run that holds a page. Where it ends, and what makes its logical pages physical."""
        starts, ends = self.slices.buffers

        def walk(reached):
            run, begin, _ = reached
            run += 1
            place = run & (SLICE - 1)

            @pl.when(place == 0)
            def enter_slice():
                self._take_slice(tile, lax.shift_right_logical(run, SLICE.bit_length() - 1))

            entry = self.slices.first_entry + place
            return run, ends[entry], starts[entry] + self.page_offset[0] - begin

        before = self.position[RUN], self.position[RUN_END], self.position[RUN_SHIFT]
        run, end, shift = lax.while_loop(lambda reached: reached[1] <= page, walk, before)
        self.position[RUN], self.position[RUN_END], self.position[RUN_SHIFT] = run, end, shift
        return end, shift

    def _first_slice(self, block: Scalar) -> Scalar:
        return jnp.int32(0)

    def _following_slice(self, tile: Scalar, slice_: Scalar) -> tuple[Scalar, Scalar]:
        (num_runs,), (_, ends) = self.lengths, self.slices.buffers
        following = slice_ + 1
        _, blocks = self.blocks(tile)
        needed = self.pages(tile).until(blocks.end * self.pages_per_block)
        reached = ends[self.slices.first_entry + SLICE - 1]
        return following, (num_runs[self.tiles.row[tile]] > following * SLICE) & (reached < needed.stop)
