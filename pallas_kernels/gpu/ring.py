"""Rings of blocks in shared memory, between the warpgroup that sends for them and those that use them."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    def scratch(buffers: int, dim: int, lanes: int, dtype: jnp.dtype, copies: int, has_scales: bool) -> tuple[Any, ...]:
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
