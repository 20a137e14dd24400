"""Passes the rows of tables in HBM through scalar memory, which is too small for the tables."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from pallas_kernels.tpu.spans import Scalar

SLICE = 128  # entries brought to scalar memory at a time: one row of a tile of int32 in HBM
BUFFERS = 2  # one in use, one arriving

TAKEN, IN_USE = range(2)  # the words of `position`

Ref = Any  # a Pallas reference


def padded(table: Int32[Array, "rows width"]) -> Int32[Array, "rows padded_width"]:
    """The table with whole slices a row: a copy of it, unless it has them already."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % SLICE)))


@dataclass(frozen=True)
class TableSlices:
    """One slice of a row in use, of all tables at once, and the one that is needed next on its way.

    Call `open` once, and `send_for` the first slice; then `take` each and `send_for` the one after it.
    """

    tables: tuple[Ref, ...]  # HBM Int32[rows, width], width a multiple of SLICE
    # What `scratch` asks for, in its order:
    buffers: tuple[Ref, ...]
    position: Ref
    arrived: Ref

    @staticmethod
    def scratch(tables: int) -> list[Any]:
        """The scratch memory for so many tables."""
        return [
            tuple(pltpu.SMEM((BUFFERS * SLICE,), jnp.int32) for _ in range(tables)),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.SemaphoreType.DMA((BUFFERS,)),
        ]

    @property
    def in_use(self) -> Scalar:
        """The slice that was taken last; −1 after `leave`."""
        return self.position[IN_USE]

    @property
    def first_entry(self) -> Scalar:
        """Where in each of `buffers` the slice in use begins."""
        return self._buffer(self.position[TAKEN] - 1) * SLICE

    def open(self) -> None:
        self.position[TAKEN] = 0
        self.leave()

    def leave(self) -> None:
        """What is taken next is of another row."""
        self.position[IN_USE] = -1

    def send_for(self, row: Scalar, slice_: Scalar) -> None:
        """Starts the copy of the slice that is taken next."""
        for copy in self._copies(row, slice_):
            copy.start()

    def take(self, row: Scalar, slice_: Scalar) -> None:
        """Waits for the slice that is on its way, which is this one."""
        for copy in self._copies(row, slice_):
            copy.wait()
        self.position[TAKEN] += 1
        self.position[IN_USE] = slice_

    def _copies(self, row: Scalar, slice_: Scalar) -> list[Any]:
        buffer = self._buffer(self.position[TAKEN])
        entries = pl.ds(pl.multiple_of(slice_ * SLICE, SLICE), SLICE)
        half = pl.ds(pl.multiple_of(buffer * SLICE, SLICE), SLICE)
        return [
            pltpu.make_async_copy(table.at[row, entries], of_table.at[half], self.arrived.at[buffer])
            for table, of_table in zip(self.tables, self.buffers, strict=True)
        ]

    def _buffer(self, slice_: Scalar) -> Scalar:
        return slice_ & (BUFFERS - 1)
