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

from pallas_kernels.gpu.layouts import MATRIX, PER_COLUMN, PER_ROW, along_columns, along_rows, filled
from pallas_kernels.gpu.masks import LEAST_REFERENCE, UNSEEN, Mask, soft_capped
from pallas_kernels.gpu.page_stream import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import BLOCK


def _chunks(dim: int) -> list[slice]:
    """Lanes taken at a time: few enough for the registers."""
    return [slice(start, min(start + 64, dim)) for start in range(0, dim, 64)]


@dataclass(frozen=True)
class CudaCore:
    """One consumer warpgroup's memory beside the rings."""

    query: Ref  # SMEM Float32[1, key_dim]
    answer: Ref  # SMEM Float32[1, value_dim]

    @staticmethod
    def scratch(key_dim: int, value_dim: int) -> tuple[Any, ...]:
        return plgpu.SMEM((1, key_dim), jnp.float32), plgpu.SMEM((1, value_dim), jnp.float32)

    @staticmethod
    def nothing(value_dim: int) -> Any:
        """The running softmax of nothing, for every place: reference, total, weighted values by chunks of lanes."""
        return (
            filled(LEAST_REFERENCE, (BLOCK,), PER_ROW),
            filled(0, (BLOCK,), PER_ROW),
            tuple(filled(0, (BLOCK, c.stop - c.start), MATRIX) for c in _chunks(value_dim)),
        )

    def send_query(self, lines: Ref, arrived: Ref) -> None:
        """Starts the copy of an item's one line."""
        plgpu.copy_gmem_to_smem(lines, self.query, arrived)

    def take(
        self,
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
        for lanes in _chunks(self.query.shape[1]):
            part = _load(keys.slots, buffer, lanes)
            query = plgpu.load(self.query.at[0, pl.ds(lanes.start, lanes.stop - lanes.start)], layout=PER_COLUMN)
            logits += (part * along_columns(query, part)).sum(axis=1)
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
        for lanes, sum_so_far in zip(_chunks(self.answer.shape[1]), weighted, strict=True):
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
        for lanes, part in zip(_chunks(self.answer.shape[1]), weighted, strict=True):
            out = (along_rows(share, part) * part).sum(axis=0)
            self.answer[0, pl.ds(lanes.start, lanes.stop - lanes.start)] = out * jnp.where(
                denominator > 0, value_scale / denominator, 0
            )
        log[0] = top + jnp.log2(denominator)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.answer, out)
        plgpu.wait_smem_to_gmem(0)


def _load(slots: Ref, buffer: Scalar, lanes: slice) -> Float32[Array, "tokens lanes"]:
    block = slots.at[buffer, :, pl.ds(lanes.start, lanes.stop - lanes.start)]
    return plgpu.load(block, layout=MATRIX).astype(jnp.float32)
