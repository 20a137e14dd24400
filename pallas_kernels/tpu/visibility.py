"""Which slots of a block the query lines of a tile see."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.arguments import Attention
from pallas_kernels.tpu.spans import Scalar, positions


@dataclass(frozen=True)
class Visibility:
    """The causal and window masks of one tile. A line is one query head of one of the tile's `tokens` places."""

    attention: Attention
    queries: Scalar
    context: Scalar
    tokens: int
    lines: int

    def sees_all(self, first: Scalar, end: Scalar) -> Bool[Array, ""]:
        """Whether every query sees the positions [first, end). Then a block needs no mask."""
        all_see = end <= self.context - self.queries + 1
        if self.attention.window is not None:
            all_see &= (first >= self.context - self.attention.window) | (end <= self.attention.kept)
        return all_see

    def of_lines(self, first: Scalar, tokens: int) -> Bool[Array, "lines tokens"]:
        """Which of the `tokens` positions from `first` on each line sees."""
        shape = (self.lines, tokens)
        position = first + lax.broadcasted_iota(jnp.int32, shape, 1)
        place = self._place(shape)
        end = jnp.where(place < self.queries, self.context - self.queries + 1 + place, 0)
        seen = position < end
        if self.attention.window is not None:
            in_window = position >= end - self.attention.window
            seen &= in_window | (position < self.attention.kept) if self.attention.kept else in_window
        return seen

    def of_slots(self, first: Scalar, shape: tuple[int, int]) -> Bool[Array, "tokens lanes"]:
        """Which of the positions from `first` on any line sees."""
        position = first + lax.broadcasted_iota(jnp.int32, shape, 0)
        span = positions(self.queries, self.context, self.attention)
        seen = position < span.end
        if self.attention.window is not None:
            in_window = position >= span.first
            seen &= in_window | (position < span.kept) if self.attention.kept else in_window
        return seen

    def has_query(self, shape: tuple[int, int]) -> Bool[Array, "lines lanes"]:
        """Which lines belong to a query."""
        return self._place(shape) < self.queries

    def _place(self, shape: tuple[int, int]) -> Int32[Array, "lines lanes"]:
        if self.tokens == 1:
            return jnp.zeros(shape, jnp.int32)
        # TPUs do not divide vectors of integers. Exact: no quotient is within rounding of a whole number.
        line = lax.broadcasted_iota(jnp.int32, shape, 0).astype(jnp.float32)
        return ((line + 0.5) * (self.tokens / self.lines)).astype(jnp.int32)
