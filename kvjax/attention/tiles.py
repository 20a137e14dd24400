"""Cuts a packed batch into tiles of queries that share a row, so that each tile reads its row's keys once."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.grant import Grant
from kvjax.packing import pack_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of up to `size` consecutive packed tokens of one row.

    Attributes:
      row: the row of each tile; `rows` (out of range) in padding.
      source: packed index of each tile's queries; the packed length (out of range) where there is none.
      visible: positions each query attends to; 0 where there is no query.
      context: one past the last position that any query of the tile's row may read.
      target: for each packed token, its place in the tiles flattened to one axis.
    """

    row: Int32[Array, " tiles"]
    source: Int32[Array, "tiles size"]
    visible: Int32[Array, "tiles size"]
    context: Int32[Array, " tiles"]
    target: Int32[Array, " packed"]

    def split(self, packed: Float[Array, "packed heads dim"]) -> Float[Array, "tiles size heads dim"]:
        """Packed queries by tile; zeros where there is no query."""
        return packed.at[self.source].get(mode="fill", fill_value=0)

    def join(self, tiled: Float[Array, "tiles size heads dim"]) -> Float[Array, "packed heads dim"]:
        """The inverse of `split`; padding tokens give zeros."""
        flat = tiled.reshape(-1, *tiled.shape[2:])
        return flat.at[self.target].get(mode="fill", fill_value=0)


def make_tiles(grant: Grant, size: int) -> Tiles:
    """Tiles of `size` queries; at most packed // size + min(rows, packed) of them.

    Size 1 is decode: one tile a token.
    """
    rows, packed = grant.rows, grant.packed
    counts = -(-grant.tokens // size)
    number = packed if size == 1 else packed // size + min(rows, packed)
    row, index = pack_rows(counts, number)
    within = index[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    tokens = grant.tokens.at[row].get(mode="fill", fill_value=0)[:, None]
    source = jnp.where(within < tokens, grant.offset.at[row].get(mode="clip")[:, None] + within, packed)
    first_tile = jnp.cumsum(counts) - counts
    inside = jnp.arange(packed, dtype=jnp.int32) - grant.offset.at[grant.row].get(mode="clip")
    target = (first_tile.at[grant.row].get(mode="clip") + inside // size) * size + inside % size
    return Tiles(
        row=row,
        source=source,
        visible=grant.visible.at[source].get(mode="fill", fill_value=0),
        context=grant.context.at[row].get(mode="fill", fill_value=0),
        target=jnp.where(grant.row < rows, target, number * size),
    )
