"""Which positions, pages and blocks a tile of queries reads: the kept ones, and those from its window on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Attention

Scalar = Any  # a traced int32, an array of them, or an int


@dataclass(frozen=True, slots=True)
class Span:
    """The items [0, kept) and [first, end), where first may be anything up to end. Items are positions, pages, …"""

    kept: Scalar
    first: Scalar
    end: Scalar

    def in_units_of(self, size: int) -> Span:
        """The units of `size` items, a power of two, that hold any of these."""
        return Span(_up(self.kept, size), down(self.first, size), _up(self.end, size))

    @property
    def start(self) -> Scalar:
        """The first item, or something at or past `end` if there is none."""
        return jnp.where(self.kept > 0, 0, self.first) if not _is_zero(self.kept) else self.first

    def after(self, item: Scalar) -> Scalar:
        """The item that follows `item`, or something at or past `end`."""
        return self._skip(item + 1)

    @property
    def stop(self) -> Scalar:
        """One past the last item, or 0 if there is none."""
        if _is_zero(self.kept):
            return jnp.where(self.first < self.end, self.end, 0)
        return jnp.where(jnp.maximum(self.first, self.kept) < self.end, self.end, self.kept)

    def until(self, limit: Scalar) -> Span:
        """Those of these items that come before `limit`."""
        kept = self.kept if _is_zero(self.kept) else jnp.minimum(self.kept, limit)
        return Span(kept, self.first, jnp.minimum(self.end, limit))

    @property
    def count(self) -> Scalar:
        """How many items there are."""
        return self.kept + jnp.maximum(self.end - jnp.maximum(self.first, self.kept), 0)

    def item(self, ordinal: Scalar) -> Scalar:
        """The item that has `ordinal` items before it."""
        return jnp.where(ordinal < self.kept, ordinal, ordinal - self.kept + jnp.maximum(self.first, self.kept))

    def _skip(self, item: Scalar) -> Scalar:
        if _is_zero(self.kept):
            return jnp.maximum(item, self.first)
        return jnp.where(item < self.kept, item, jnp.maximum(item, self.first))


def positions(queries: Scalar, context: Scalar, attention: Attention) -> Span:
    """The positions that any of a tile's `queries` sees, the last of which sees `context`."""
    end = jnp.where(queries > 0, context, 0)
    if attention.window is None:
        return Span(0, 0, end)
    first = jnp.maximum(context - queries + 1 - attention.window, 0)
    kept = jnp.minimum(attention.kept, end) if attention.kept else 0
    return Span(kept, first, end)


def down(item: Scalar, size: int) -> Scalar:
    """item // size, for an item that is not negative and a power of two."""
    if isinstance(item, int):
        return item // size
    return lax.shift_right_logical(item, jnp.int32(size.bit_length() - 1))


def _up(item: Scalar, size: int) -> Scalar:
    return down(item + (size - 1), size)


def _is_zero(item: Scalar) -> bool:
    return isinstance(item, int) and item == 0
