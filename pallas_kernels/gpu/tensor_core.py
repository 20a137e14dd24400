"""The arithmetic in bfloat16 and float16: both products on the tensor cores, accumulated in float32.

An item is up to 64 query lines that read one KV head, padded to the 64 rows of a WGMMA instruction.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.gpu.layouts import (
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    along_columns,
    along_rows,
    filled,
    lane_chunks,
    tiled,
)
from pallas_kernels.gpu.masks import LEAST_REFERENCE, UNSEEN, Mask, soft_capped
from pallas_kernels.gpu.ring import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import BLOCK

TILE = 64  # rows of a WGMMA instruction
PADDING = 8  # lines are padded to whole rows of shared-memory tiles


@dataclass(frozen=True)
class TensorCore:
    """The shared memory of consumers beside the rings, with an axis of consumers before it is one's own."""

    weights: Ref  # [TILE, BLOCK]
    dequantised: tuple[Ref, ...]  # [BLOCK, key_dim] and [BLOCK, value_dim], if the pool is quantised
    answer: Ref  # Float32[TILE, answer_lanes]
    log: Ref  # Float32[TILE]
    interpreted: bool

    @staticmethod
    def scratch(
        consumers: int, keys: tuple[int, int], values: tuple[int, int], dtype: jnp.dtype, quantised: bool
    ) -> tuple[Any, ...]:
        """`keys` and `values` are each the length of a row, and the lanes of it that tiles divide."""
        value_dim, value_lanes = values
        codes = tuple(tiled((consumers, BLOCK, dim), dtype, lanes) for dim, lanes in (keys, values))
        return (
            tiled((consumers, TILE, BLOCK), dtype, value_lanes),
            codes if quantised else (),
            plgpu.SMEM((consumers, TILE, answer_lanes(value_dim)), jnp.float32),
            plgpu.SMEM((consumers, TILE), jnp.float32),
        )

    def of(self, consumer: Scalar) -> "TensorCore":
        """What belongs to one consumer."""
        codes = tuple(of_all.at[consumer] for of_all in self.dequantised)
        return TensorCore(
            self.weights.at[consumer], codes, self.answer.at[consumer], self.log.at[consumer], self.interpreted
        )

    @staticmethod
    def nothing(values: Ring) -> Any:
        """The running softmax of nothing: reference, total, weighted values."""
        return (
            filled(LEAST_REFERENCE, (TILE,), PER_ROW),
            filled(0, (TILE,), PER_ROW),
            filled(0, (TILE, values.slots.shape[2]), MATRIX),
        )

    def take(
        self,
        query: Ref,
        keys: Ring,
        values: Ring,
        turn: Scalar,
        block: Scalar,
        mask: Mask,
        scale: Scalar,
        soft_cap: float | None,
        state: Any,
    ) -> Any:
        """Takes a block into the running softmax, whose exponents are of base 2."""
        reference, total, weighted = state
        buffer = keys.take(turn)
        key_block = keys.slots.at[buffer]
        if self.dequantised:
            key_block = self._dequantise(key_block, self.dequantised[0], keys.lanes, None)
        logits = scale * _product(query, key_block.transpose((1, 0)))
        if keys.scales:
            logits *= along_columns(plgpu.load(keys.scales[0].at[buffer], layout=PER_COLUMN), logits)
        keys.release(buffer)
        logits = mask.of_logits(block, soft_capped(logits, soft_cap), UNSEEN)
        new_reference = jnp.maximum(reference, logits.max(axis=1))
        decay = jnp.exp2(reference - new_reference)
        weight = jnp.exp2(logits - along_rows(new_reference, logits))
        total = decay * total + weight.sum(axis=1)

        buffer = values.take(turn)
        value_block = values.slots.at[buffer]
        if values.scales:
            # Where nothing is seen the scale may be NaN, which a weight of zero does not silence.
            scales = mask.of_columns(block, plgpu.load(values.scales[0].at[buffer], layout=PER_COLUMN))
            weight *= along_columns(scales, weight)
        self.weights[...] = weight.astype(self.weights.dtype)  # before the values need registers
        if self.dequantised:
            value_block = self._dequantise(value_block, self.dequantised[1], values.lanes, (mask, block))
        else:
            mask.clear_unseen(block, value_block)
        plgpu.commit_smem()
        weighted = self._accumulate(along_rows(decay, weighted) * weighted, self.weights, value_block)
        values.release(buffer)
        return new_reference, total, weighted

    def _accumulate(self, sums: Array, a: Ref, b: Ref) -> Array:
        """sums + a @ b, in the registers of the sums."""
        if self.interpreted:  # the interpreter has no accumulator that begins with a value
            return sums + _product(a, b)
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(sums))

    def _dequantise(self, codes: Ref, target: Ref, lanes_at_once: int, cleared: tuple[Mask, Scalar] | None) -> Ref:
        """The numbers that codes stand for, but for their scale, as an operand of a matrix instruction."""
        free_of_conflicts = lanes_at_once % 32 == 0
        for lanes in lane_chunks(codes.shape[1], lanes_at_once):
            numbers = plgpu.load(codes.at[:, lanes], layout=MATRIX, optimized=free_of_conflicts)
            if jnp.issubdtype(codes.dtype, jnp.floating):
                numbers = numbers.astype(jnp.float32)  # there is no instruction for less
            numbers = numbers.astype(target.dtype)
            if cleared is not None:
                mask, block = cleared
                numbers = mask.of_values(block, numbers)
            plgpu.store(target.at[:, lanes], numbers, optimized=free_of_conflicts)
        plgpu.commit_smem()
        return target

    def write(self, state: Any, value_scale: Scalar, out: Ref, log: Ref) -> None:
        """Writes what the softmax has come to, and the logarithm of its denominator, for the lines that `out` has."""
        reference, total, weighted = state
        lines, value_dim = out.shape
        inverse = jnp.where(total > 0, value_scale / total, 0)
        self.log[...] = reference + jnp.log2(total)
        weighted *= along_rows(inverse, weighted)
        lanes = self.answer.shape[1]
        for start in range(0, value_dim, lanes):
            self.answer[...] = weighted[:, start : start + lanes]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.answer.at[pl.ds(0, lines)], out.at[:, pl.ds(start, lanes)])
            plgpu.wait_smem_to_gmem(0)
        plgpu.copy_smem_to_gmem(self.log.at[pl.ds(0, lines)], log)
        plgpu.wait_smem_to_gmem(0)


def answer_lanes(value_dim: int) -> int:
    """Lanes of the answer that pass through shared memory at a time."""
    return 64 if value_dim % 64 == 0 else value_dim


def _product(a: Ref, b: Ref) -> Array:
    """a @ b on the tensor cores, in float32; both in shared memory."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
