"""Equal shares of all the work for every thread block, and the sum of what they computed.

An item is what one running softmax is kept for: the lines of a tile that read one KV head. It costs as many units as
it reads blocks of BLOCK tokens. The units of all items, one after another, are cut into equal shares, as in Stream-K
(Osama et al. 2023, arXiv:2301.03598): so one long row among short ones keeps every multiprocessor busy. An item that
is cut leaves several pieces, which `merge` weighs by their softmax denominators, as in Flash-Decoding (Dao et al.
2023).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.arguments import Attention, Tiles

BLOCK = 64  # tokens of one step: what one warpgroup's matrix instruction takes as rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes what.

    Attributes:
      units: blocks that each item of a tile reads.
      before: units of all tiles before a tile.
      kept: blocks at the beginning of a row that a tile reads for the sake of kept positions.
      skipped: what is added to the number of a later unit to make it that of a block.
      shares: of each worker: first unit, one past the last, first item, one past the last.
    """

    units: Int32[Array, " tiles"]
    before: Int32[Array, " tiles"]
    kept: Int32[Array, " tiles"]
    skipped: Int32[Array, " tiles"]
    shares: Int32[Array, "workers 4"]


def make_schedule(tiles: Tiles, attention: Attention, items_per_tile: int, workers: int) -> Schedule:
    """Shares the blocks of all tiles between `workers`. O(tiles · workers) comparisons in one fused operation.

    All units together are at most 2³¹ − 1.
    """
    end = jnp.where(tiles.queries > 0, tiles.context, 0)
    blocks = -(-end // BLOCK)
    kept = jnp.minimum(-(-attention.kept // BLOCK), blocks)
    first = jnp.zeros_like(blocks)
    if attention.window is not None:
        first = jnp.maximum(tiles.context - tiles.queries + 1 - attention.window, 0) // BLOCK
    first = jnp.clip(first, kept, blocks)
    units = kept + blocks - first

    until = jnp.cumsum(units * items_per_tile)
    before = until - units * items_per_tile
    share, rest = until[-1] // workers, until[-1] % workers
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    edges = worker * share + jnp.minimum(worker, rest)

    def item_of(unit: Int32[Array, " workers"]) -> Int32[Array, " workers"]:
        tile = jnp.searchsorted(until, unit, side="right", method="compare_all").astype(jnp.int32)
        tile = jnp.minimum(tile, until.shape[0] - 1)
        return tile * items_per_tile + (unit - before[tile]) // jnp.maximum(units[tile], 1)

    start, stop = edges[:-1], edges[1:]
    busy = stop > start
    first_item, last_item = jnp.where(busy, item_of(start), 0), jnp.where(busy, item_of(stop - 1) + 1, 0)
    shares = jnp.stack([start, stop, first_item, last_item], axis=1).astype(jnp.int32)
    return Schedule(units, before, kept, first - kept, shares)


def merge(
    pieces: Float32[Array, "pieces consumers lines value_dim"],
    logs: Float32[Array, "pieces consumers lines"],
    schedule: Schedule,
    items: int,
) -> tuple[Float32[Array, "items lines value_dim"], Float32[Array, "items lines"]]:
    """The answer of every item, and the base-2 logarithm of its softmax denominator; 0 and −∞ where nothing was seen.

    Piece `item + worker` is what that worker's consumers computed of that item: both only ever grow, so no two pieces
    meet. Those that nobody computed hold anything.
    """
    per_tile = items // schedule.units.shape[0]
    item = jnp.arange(items, dtype=jnp.int32)
    tile = item // per_tile
    units = schedule.units[tile]
    start = schedule.before[tile] + item % per_tile * units
    stop = start + units
    first, last = _worker_of(start, schedule), _worker_of(stop - 1, schedule)

    piece = jnp.arange(pieces.shape[0], dtype=jnp.int32)
    of_piece = jnp.zeros(pieces.shape[0], jnp.int32).at[item + first].max(item, mode="drop")
    of_piece = jax.lax.cummax(of_piece)
    real = (units[of_piece] > 0) & (piece <= of_piece + last[of_piece]) & (piece >= of_piece + first[of_piece])
    target = jnp.where(real, of_piece, items)
    logs = jnp.where(real[:, None, None], logs, -jnp.inf)

    top = jnp.full((items, logs.shape[2]), -jnp.inf).at[target].max(logs.max(axis=1), mode="drop")
    base = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp2(logs - base[of_piece][:, None])
    total = jnp.zeros_like(top).at[target].add(weight.sum(axis=1), mode="drop")
    weighted = jnp.where(real[:, None, None, None], weight[..., None] * pieces, 0).sum(axis=1)
    summed = jnp.zeros((items, *weighted.shape[1:])).at[target].add(weighted, mode="drop")
    return summed / jnp.where(total > 0, total, 1)[..., None], base + jnp.log2(total)


def _worker_of(unit: Int32[Array, " items"], schedule: Schedule) -> Int32[Array, " items"]:
    """Which worker's share a unit is in."""
    workers = schedule.shares.shape[0]
    total = schedule.shares[-1, 1]
    share, rest = total // workers, total % workers
    longer = rest * (share + 1)  # the units of the workers that have one more than the others
    short = rest + (unit - longer) // jnp.maximum(share, 1)
    return jnp.clip(jnp.where(unit < longer, unit // (share + 1), short), 0, workers - 1)
