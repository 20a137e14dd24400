"""Which positions of a block the query lines of an item see, and the cap on their logits."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.layouts import MATRIX, PER_COLUMN, PER_ROW, along_rows, lane_chunks
from pallas_kernels.gpu.ring import Ref, Scalar
from pallas_kernels.gpu.schedule import BLOCK

# Logits of slots that a query does not see: finite, for −inf − (−inf) would be NaN, and so far below the least
# reference that their weight is exactly zero, whether the query has seen anything yet or not.
UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
LEAST_REFERENCE = UNSEEN / 2


@dataclass(frozen=True)
class Mask:
    """The causal and window masks of one item. Each line sees up to its `ends`, the tile as a whole up to `context`."""

    attention: Attention
    ends: Int32[Array, " lines"] | Scalar  # one number where all lines see the same
    queries: Scalar
    context: Scalar

    def of_logits(
        self, block: Scalar, x: Float32[Array, "lines tokens"], unseen: float
    ) -> Float32[Array, "lines tokens"]:
        """`unseen` where a line does not see the position."""
        position = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=MATRIX)
        ends = along_rows(self.ends, x) if getattr(self.ends, "ndim", 0) else self.ends
        return jnp.where(self._seen(position, ends, ends), x, unseen)

    def of_places(self, block: Scalar, x: Float32[Array, " tokens"], unseen: float) -> Float32[Array, " tokens"]:
        """The same for one line, whose logits lie along rows."""
        position = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=PER_ROW)
        return jnp.where(self._seen(position, self.ends, self.ends), x, unseen)

    def of_columns(self, block: Scalar, x: Float32[Array, " tokens"]) -> Float32[Array, " tokens"]:
        """Zero where no line sees the position, for numbers that lie along columns of logits."""
        position = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=PER_COLUMN)
        return jnp.where(self._seen(position, self._first_end, self.context), x, 0)

    def of_values(self, block: Scalar, x: Float[Array, "tokens dim"]) -> Float[Array, "tokens dim"]:
        """Zero where no line sees the position: a weight of zero does not silence a NaN."""
        position = block * BLOCK + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=MATRIX)
        return jnp.where(self._seen(position, self._first_end, self.context), x, 0)

    def clear_unseen(self, block: Scalar, values: Ref) -> None:
        """`of_values` in shared memory, and nothing where some line sees every position."""
        has_unseen = (block + 1) * BLOCK > self.context
        if self.attention.window is not None:
            has_unseen |= block * BLOCK < self._first_end - self.attention.window

        @pl.when(has_unseen)
        def clear():
            for lanes in lane_chunks(values.shape[1], 64):
                values[:, lanes] = self.of_values(block, plgpu.load(values.at[:, lanes], layout=MATRIX))
            plgpu.commit_smem()

    @property
    def _first_end(self) -> Scalar:
        """One past the last position that the first query sees; its window begins first."""
        return self.context - self.queries + 1

    def _seen(self, position: Any, first_end: Any, last_end: Any) -> Bool[Array, "..."]:
        seen = position < last_end
        if self.attention.window is not None:
            in_window = position >= first_end - self.attention.window
            seen &= in_window | (position < self.attention.kept) if self.attention.kept else in_window
        return seen


def soft_capped(logits: Float32[Array, "..."], soft_cap: float | None) -> Float32[Array, "..."]:
    """cap · tanh(x / cap), if there is a cap, times log₂e: from here on exponents are of base 2.

    By way of exp2, whose approximation is good to float32, as that of tanh is not.
    """
    log2e = math.log2(math.e)
    if soft_cap is None:
        return log2e * logits
    return (log2e * soft_cap) * (1 - 2 / (1 + jnp.exp2((2 * log2e / soft_cap) * logits)))
