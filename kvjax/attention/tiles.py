"""Cuts a packed batch into tiles of queries that share a row, so that each tile reads its row's keys once."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from kvjax.grant import Grant
from kvjax.packing import pack_rows
from pallas_kernels.arguments import Tiles

MAX_TILE = 32
"""Most queries a tile in plain XLA: a row's keys are read once for this many."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Tiling:
    """A packed batch in tiles of up to `size` consecutive tokens of one row, and the way there and back.

    Attributes:
      tiles: whose queries they are and what they see; the row is out of range in padding.
      source: packed index of each tile's queries; the packed length (out of range) where there is none.
      target: for each packed token, its place in the tiles flattened to one axis.
    """

    tiles: Tiles
    source: Int32[Array, "tiles size"]
    target: Int32[Array, " packed"]

    def split(self, packed: Float[Array, "packed heads dim"]) -> Float[Array, "tiles size heads dim"]:
        """Packed queries by tile; zeros where there is no query."""
        return packed.at[self.source].get(mode="fill", fill_value=0)

    def join(self, tiled: Float[Array, "tiles size heads dim"]) -> Float[Array, "packed heads dim"]:
        """The inverse of `split`; padding tokens give zeros."""
        flat = tiled.reshape(-1, *tiled.shape[2:])
        return flat.at[self.target].get(mode="fill", fill_value=0)


def make_tiling(grant: Grant, size: int) -> Tiling:
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
    visible = grant.visible.at[source].get(mode="fill", fill_value=0)
    tiles = Tiles(row=row, queries=jnp.sum(visible > 0, axis=1, dtype=jnp.int32), context=visible.max(axis=1))
    return Tiling(
        tiles=tiles,
        source=source,
        target=jnp.where(grant.row < rows, target, number * size),
    )


def tile_size(packed: int, rows: int, most: int = MAX_TILE) -> int:
    """Queries a tile: a power of two near the tokens a row brings, so that few places of a tile stay empty."""
    return 1 if packed <= rows else min(1 << most.bit_length() - 1, 1 << (packed // rows).bit_length() - 1)
