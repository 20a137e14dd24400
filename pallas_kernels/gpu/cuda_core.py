"""The arithmetic in float32: exact products on the CUDA cores, for the tensor cores would round to TF32.

An item is one query line. Each of the BLOCK places in a block keeps a softmax of its own over the tokens that pass
through it; the places are merged once, at the end, so that no step exchanges anything between warps.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.gpu.layouts import MATRIX, PER_COLUMN, PER_ROW, along_columns, along_rows, filled, lane_chunks
from pallas_kernels.gpu.masks import LEAST_REFERENCE, UNSEEN, Mask, soft_capped
from pallas_kernels.gpu.ring import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import BLOCK


@dataclass(frozen=True)
class CudaCore:
    """The shared memory of consumers beside the rings, with an axis of consumers before it is one's own."""

    answer: Ref  # Float32[1, value_dim]

    @staticmethod
    def scratch(consumers: int, value_dim: int) -> tuple[Any, ...]:
        return (plgpu.SMEM((consumers, 1, value_dim), jnp.float32),)

    def of(self, consumer: Scalar) -> "CudaCore":
        """What belongs to one consumer."""
        return CudaCore(self.answer.at[consumer])

    def nothing(self, values: Ring) -> Any:
        """The running softmax of nothing, for every place: reference, total, weighted values by chunks of lanes."""
        return (
            filled(LEAST_REFERENCE, (BLOCK,), PER_ROW),
            filled(0, (BLOCK,), PER_ROW),
            tuple(filled(0, (BLOCK, int(lanes.size)), MATRIX) for lanes in _chunks(values)),
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
        """Takes a block into the running softmax of each place, whose exponents are of base 2."""
        reference, total, weighted = state
        buffer = keys.take(turn)
        logits = filled(0, (BLOCK,), PER_ROW)
        for lanes in _chunks(keys):
            part = _load(keys.slots, buffer, lanes)
            of_query = plgpu.load(query.at[0, lanes], layout=PER_COLUMN)
            logits += (part * along_columns(of_query, part)).sum(axis=1)
        if keys.scales:
            logits *= plgpu.load(keys.scales[0].at[buffer], layout=PER_ROW)
        plgpu.commit_smem()  # every warp has read the buffer before it is sent for again
        keys.release(buffer)
        logits = mask.of_places(block, soft_capped(scale * logits, soft_cap), UNSEEN)
        new_reference = jnp.maximum(reference, logits)
        decay = jnp.exp2(reference - new_reference)
        weight = jnp.exp2(logits - new_reference)
        total = decay * total + weight

        buffer = values.take(turn)
        if values.scales:
            weight *= plgpu.load(values.scales[0].at[buffer], layout=PER_ROW)
            weight = mask.of_places(block, weight, 0.0)  # where nothing is seen the scale may be NaN
        parts = []
        for lanes, sum_so_far in zip(_chunks(values), weighted, strict=True):
            part = mask.of_values(block, _load(values.slots, buffer, lanes))
            parts.append(along_rows(decay, part) * sum_so_far + along_rows(weight, part) * part)
        plgpu.commit_smem()
        values.release(buffer)
        return new_reference, total, tuple(parts)

    def write(self, state: Any, value_scale: Scalar, out: Ref, log: Ref) -> None:
        """Writes the softmax over all places, and the logarithm of its denominator."""
        reference, total, weighted = state
        top = reference.max(axis=0)
        share = jnp.exp2(reference - top)
        denominator = (share * total).sum(axis=0)
        inverse = jnp.where(denominator > 0, 1 / denominator, 0)
        start = 0
        for part in weighted:
            whole = (along_rows(share, part) * part).sum(axis=0) * value_scale
            self.answer[0, pl.ds(start, part.shape[1])] = whole * inverse
            start += part.shape[1]
        log[0] = top + jnp.log2(denominator)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.answer, out)
        plgpu.wait_smem_to_gmem(0)


def _chunks(ring: Ring) -> list[pl.Slice]:
    """Lanes of a ring's rows that fit in the registers at a time."""
    of_8_bits = ring.slots.dtype.itemsize == 1
    return lane_chunks(ring.slots.shape[2], ring.lanes if of_8_bits else 64)


def _load(slots: Ref, buffer: Scalar, lanes: pl.Slice) -> Float32[Array, "tokens lanes"]:
    block = slots.at[buffer, :, lanes]
    return plgpu.load(block, layout=MATRIX, optimized=block.shape[1] % 32 == 0).astype(jnp.float32)
