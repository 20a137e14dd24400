"""Equal shares of the blocks for the cores of a chip, and the tile that is cut between two of them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.tpu.spans import positions

NO_LIMIT = 2**30  # a block that no tile has


@dataclass(frozen=True, slots=True)
class Shares:
    """Which tiles and blocks each core reads.

    Attributes:
      of_cores: first tile, one past the last, first block of the first tile, one past the last block of the last tile.
      steps: the most tiles that a core has.
      cut: the tile that core 0 leaves to core 1 in the middle; the number of tiles, if none.
    """

    of_cores: Int32[Array, "cores 4"]
    steps: Int32[Array, ""] | int
    cut: Int32[Array, ""] | int


def shares(tiles: Tiles, attention: Attention, block_tokens: int, cores: int) -> Shares:
    """Shares the blocks of all tiles, in order, evenly between one core or two. Cost: O(tiles)."""
    number = tiles.row.shape[0]
    if cores == 1:
        return Shares(jnp.array([[0, number, 0, NO_LIMIT]], jnp.int32), number, number)
    span = positions(tiles.queries, tiles.context, attention).in_units_of(block_tokens)
    until = jnp.cumsum(span.count)
    half = (until[-1] + 1) // 2
    tile = jnp.searchsorted(until, half).astype(jnp.int32)
    taken = half - jnp.where(tile > 0, until[tile - 1], 0)  # blocks of this tile that core 0 reads
    is_cut = taken < span.count[tile]
    of_tile = positions(tiles.queries[tile], tiles.context[tile], attention).in_units_of(block_tokens)
    block = jnp.where(is_cut, of_tile.item(taken), 0)
    second = tile + jnp.where(is_cut, 0, 1)
    of_cores = jnp.array([[0, 0, 0, NO_LIMIT], [0, number, 0, NO_LIMIT]], jnp.int32)
    of_cores = of_cores.at[0, 1].set(tile + 1).at[0, 3].set(jnp.where(is_cut, block, NO_LIMIT))
    of_cores = of_cores.at[1, 0].set(second).at[1, 2].set(block)
    return Shares(of_cores, jnp.maximum(tile + 1, number - second), jnp.where(is_cut, tile, number))


def join(
    pieces: Float[Array, "pieces kv_heads lines value_dim"],
    shares: Shares,
    halves: tuple[
        Float32[Array, "2 kv_heads lines 1"],
        Float32[Array, "2 kv_heads lines 1"],
        Float32[Array, "2 kv_heads lines value_dim"],
    ],
) -> Float[Array, "tiles kv_heads lines value_dim"]:
    """The answers of all tiles, from those of each core and the running softmax of both halves of the cut tile.

    Piece p is tile p of core 0 or tile p − 1 of core 1; halves are the largest logit, the sum of weights relative to it
    and the weighted sum of values.
    """
    number = pieces.shape[0] - 1
    tile = jnp.arange(number, dtype=jnp.int32)
    out = pieces[tile + (tile >= shares.of_cores[1, 0])]
    maximum, total, weighted = halves
    decay = jnp.exp(maximum - maximum.max(axis=0))
    whole = (decay * weighted).sum(axis=0) / jnp.maximum((decay * total).sum(axis=0), jnp.finfo(jnp.float32).tiny)
    return out.at[shares.cut].set(whole.astype(out.dtype), mode="drop")


jax.tree_util.register_dataclass(Shares, ("of_cores", "steps", "cut"), ())
