"""The share of the schedule that one thread block walks through."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.ring import Ref, Scalar


@dataclass(frozen=True)
class Worker:
    """The share of one thread block: both of its warpgroups walk through it alike."""

    shares: Ref  # GMEM Int32[workers, 4]
    units: Ref  # GMEM Int32[tiles], and so are the next three
    before: Ref
    kept: Ref
    skipped: Ref
    index: Scalar
    items_per_tile: int

    def walk(self, of_item: Callable[..., Any], state: Any) -> Any:
        """Folds `of_item(tile, within, piece, turn, units, block_of, state) -> state` over the items of the share.

        `within` is the item's number in its tile, `turn` counts the worker's units before it, `units` is [first, end)
        of the item's units, and `block_of` makes a unit a block.
        """
        start, stop = self.shares[self.index, 0], self.shares[self.index, 1]

        def visit(item: Scalar, state: Any) -> Any:
            tile, within = lax.div(item, self.items_per_tile), lax.rem(item, self.items_per_tile)
            units, kept, skipped = self.units[tile], self.kept[tile], self.skipped[tile]
            begin = self.before[tile] + within * units
            first, end = jnp.maximum(start - begin, 0), jnp.minimum(stop - begin, units)

            def block_of(unit: Scalar) -> Scalar:
                return jnp.where(unit < kept, unit, unit + skipped)

            turn = begin + first - start
            return of_item(tile, within, item + self.index, turn, (first, end), block_of, state)

        return lax.fori_loop(self.shares[self.index, 2], self.shares[self.index, 3], visit, state)
