"""Moving pages, for all their holders at once, so that rows in many runs come to few; `planning` says which."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.extents.free import bring_pages, free_pages_among, note_dropped
from kvjax.extents.runs import Entries, append, runs_added, shorten
from kvjax.extents.table import Extents, ExtentTable
from kvjax.inputs import integers
from kvjax.packing import pack_rows
from kvjax.pages import PageCopy, Status
from kvjax.pages.holders import change_holders, take_pages
from kvjax.pages.mapping import read_entries, within_bound, write_entries
from kvjax.pages.table import GroupPages


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Moves:
    """Pages of one group to be moved, and every row that maps them.

    Attributes:
      source, target: a move each; `num_pages` in both for padding.
      row, logical, move: table entries, each with the number of the move that changes it, in ascending order of move;
        padding has row == rows.
    """

    source: Int32[Array, " moves"]
    target: Int32[Array, " moves"]
    row: Int32[Array, " entries"]
    logical: Int32[Array, " entries"]
    move: Int32[Array, " entries"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class CompactInfo:
    """What a `compact` did.

    Attributes:
      status: `Status` of the whole call.
      copies: the pages to copy before the new table is used, as `kvjax.storage.copy_pages` takes them; `num_pages`
        means none.
    """

    status: Int32[Array, ""]
    copies: PageCopy


def compact(extents: ExtentTable, moves: Moves, *, group: int = 0, max_pages: int) -> tuple[ExtentTable, CompactInfo]:
    """Moves pages of one group, for all their holders at once, or does nothing.

    The pages left behind go to limbo like any that lose their last holder: they are not reused before the epoch that
    may still read them is complete.

    Args:
      extents: the state.
      moves: what to move, as `plan_compaction` says for this state.
      group: which group's pages.
      max_pages: static bound on the pages of the rows that are touched, whose runs are listed anew.

    Status: OK; STALE if the moves do not fit the state (a source with a pin or a holder that is not listed, a target
    that is not free, anything named twice); OVER_BOUND; FRAGMENTED if a row would come to more than `max_runs` runs.
    O(rows + moves + entries + max_pages), and sorts of those lists.
    """
    table, rows = extents.table, extents.table.rows
    held, extent = table.groups[group], extents.extents[group]
    none = held.num_pages
    moves = _as_integers(moves, rows)
    maps = read_entries(held, moves.row, moves.logical)
    new_page = moves.target.at[moves.move].get(mode="fill", fill_value=none)
    touched = jnp.zeros(rows, bool).at[moves.row].set(True, mode="drop")
    counts = jnp.where(touched, held.end, 0)
    fits = jnp.all(within_bound(counts, max_pages))
    listing = _listing(held, moves, jnp.where(fits, counts, 0), max_pages)
    added = runs_added(shorten(extent.runs, jnp.where(touched, 0, held.end)), listing)
    status = jnp.where(jnp.any(added > extent.runs.max_runs), Status.FRAGMENTED, Status.OK)
    status = jnp.where(fits, status, Status.OVER_BOUND)
    status = jnp.where(_fit(held, extent, moves, maps, rows), status, Status.STALE).astype(jnp.int32)

    reads = (moves, maps, new_page, touched, listing, status)
    reads, held, extent = lax.optimization_barrier((reads, held, extent))
    moves, maps, new_page, touched, listing, status = reads
    acts = status == Status.OK
    source, target = (jnp.where(acts, ids, none) for ids in (moves.source, moves.target))
    row = jnp.where(acts, moves.row, rows)
    changed = row < rows
    after, extent = bring_pages(held, extent, target)
    after, _, taken = take_pages(after, jnp.sum(target < none, dtype=jnp.int32), target.shape[0])
    after = write_entries(after, row, moves.logical, new_page)
    # Taking a page gave it its first holder: the first entry of its move.
    first = jnp.concatenate([jnp.ones(1, bool), moves.move[1:] != moves.move[:-1]])
    gained, lost = jnp.where(changed & ~first, new_page, none), jnp.where(changed, maps, none)
    after, faults = change_holders(after, gained, lost)
    after, extent = note_dropped(held, after, extent, row.shape[0])
    touched &= acts
    runs = append(shorten(extent.runs, jnp.where(touched, 0, after.end)), listing.only(touched))

    def with_group(parts: tuple, part: GroupPages | Extents) -> tuple:
        return (*parts[:group], part, *parts[group + 1 :])

    table = replace(table, groups=with_group(table.groups, after), faults=table.faults | taken | faults)
    updated = with_group(extents.extents, replace(extent, runs=runs))
    return ExtentTable(table, updated), CompactInfo(status, PageCopy(source, target))


def _as_integers(moves: Moves, rows: int) -> Moves:
    """The moves as int32, rows out of range as padding."""
    move = integers("moves.source", moves.source, (None,), "page ids [moves]")
    size = (move.shape[0], integers("moves.row", moves.row, (None,), "row numbers [entries]").shape[0])
    parts = {
        name: integers(f"moves.{name}", getattr(moves, name), (size[names],), f"integers [{size[names]}]")
        for names, group in enumerate((("source", "target"), ("row", "logical", "move")))
        for name in group
    }
    parts["row"] = jnp.where((parts["row"] < 0) | (parts["row"] > rows), rows, parts["row"])
    return Moves(**parts)


def _fit(
    group: GroupPages, extent: Extents, moves: Moves, maps: Int32[Array, " entries"], rows: int
) -> Bool[Array, ""]:
    """Do the moves fit the state: every holder of every source listed, no pin, free targets, nothing named twice?"""
    none, size = group.num_pages, moves.source.shape[0]
    real, some = moves.row < rows, moves.source < none
    holders = jnp.zeros(size, jnp.int32).at[jnp.where(real, moves.move, size)].add(1, mode="drop")
    listed = (holders > 0) & (holders == group.refcount.at[moves.source].get(mode="fill", fill_value=0))
    pinned = group.pins.at[moves.source].get(mode="fill", fill_value=1) != 0
    ordered = jnp.all(~real[1:] | (real[:-1] & (moves.move[1:] >= moves.move[:-1])))
    named = (maps < none) & (maps == moves.source.at[moves.move].get(mode="fill", fill_value=none))
    movable = (moves.source >= 0) & listed & ~pinned & free_pages_among(group, extent, moves.target)
    idle = (moves.source == none) & (moves.target == none) & (holders == 0)
    in_range = (moves.logical >= 0) & (moves.move >= 0) & (moves.move < size)
    return (
        ordered
        & jnp.all(jnp.where(some, movable, idle))
        & jnp.all(~real | (in_range & (moves.logical < group.end.at[moves.row].get(mode="clip")) & named))
        & _distinct(some, moves.source)
        & _distinct(some, moves.target)
        & _distinct(real, moves.row, moves.logical)
    )


def _distinct(real: Bool[Array, " n"], *keys: Int32[Array, " n"]) -> Bool[Array, ""]:
    """No two real places have the same keys.  O(n log n)."""
    padding, *ordered = lax.sort((~real, *keys), num_keys=1 + len(keys))
    same = jnp.all(jnp.stack([key[1:] == key[:-1] for key in ordered]), axis=0)
    return ~jnp.any(same & ~padding[1:])


def _listing(group: GroupPages, moves: Moves, counts: Int32[Array, " rows"], max_pages: int) -> Entries:
    """The pages that rows of the given counts will map, from their beginning."""
    row, index = pack_rows(counts, max_pages)
    page = read_entries(group, row, index)
    source, target = lax.sort((moves.source, moves.target), num_keys=1)
    at = jnp.searchsorted(source, page, method="sort").astype(jnp.int32)
    moved = source.at[at].get(mode="fill", fill_value=-1) == page
    page = jnp.where(moved, target.at[at].get(mode="fill", fill_value=0), page)
    return Entries(row, index, page, (row < counts.shape[0]) & (index == 0))
