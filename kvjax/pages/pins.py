"""Holders that are not rows: a prefix index, a copy in flight or a snapshot keeps pages alive by `pin`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from kvjax.inputs import integers
from kvjax.pages.holders import change_holders
from kvjax.pages.status import Status
from kvjax.pages.table import PageTable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PinInfo:
    """`Status` of each id that was given, an entry a group; OK for ids that are `num_pages` (none)."""

    status: tuple[Int32[Array, " ids"], ...]


def pin(table: PageTable, pages: Sequence[Int32[Array, " _"]]) -> tuple[PageTable, PinInfo]:
    """Adds a pin to each page; a page named twice is pinned twice.

    A pin keeps a page alive and its committed positions as they are; what a row has reserved and not committed is that
    row's to write.

    Args:
      table: the state.
      pages: page ids of each group; `num_pages` means none.

    Status of an id: OK, or STALE if the page has no holder at entry or is no page.  O(ids).
    """
    pages = _page_ids(table, pages)
    groups, codes, faults = [], [], table.faults
    for group, ids in zip(table.groups, pages, strict=True):
        asked = ids != group.num_pages
        page = jnp.where((ids < 0) | (ids > group.num_pages), group.num_pages, ids)
        held = group.refcount.at[page].get(mode="fill", fill_value=0) > 0
        held, pins = lax.optimization_barrier((held, group.pins))
        page = jnp.where(held, page, group.num_pages)
        group = replace(group, pins=pins.at[page].add(1, mode="drop"))
        group, fault = change_holders(group, page, jnp.zeros(0, jnp.int32))
        groups.append(group)
        codes.append(jnp.where(asked & ~held, Status.STALE, Status.OK).astype(jnp.int32))
        faults |= fault
    return replace(table, groups=tuple(groups), faults=faults), PinInfo(tuple(codes))


def unpin(table: PageTable, pages: Sequence[Int32[Array, " _"]]) -> tuple[PageTable, PinInfo]:
    """Takes one pin from each page for each time it is named; pages left without a holder go to limbo.

    Status of an id: OK, or STALE if the page has fewer pins than the call would take; then none of them is taken.
    O(ids).
    """
    pages = _page_ids(table, pages)
    groups, codes, faults = [], [], table.faults
    for group, ids in zip(table.groups, pages, strict=True):
        asked = ids != group.num_pages
        page = jnp.where((ids < 0) | (ids > group.num_pages), group.num_pages, ids)
        pins = group.pins.at[page].add(-1, mode="drop")
        left = pins.at[page].get(mode="fill", fill_value=-1)
        left, pins = lax.optimization_barrier((left, pins))
        pins = pins.at[jnp.where(left < 0, page, group.num_pages)].add(1, mode="drop")
        page = jnp.where(left >= 0, page, group.num_pages)
        group, fault = change_holders(replace(group, pins=pins), jnp.zeros(0, jnp.int32), page)
        groups.append(group)
        codes.append(jnp.where(asked & (left < 0), Status.STALE, Status.OK).astype(jnp.int32))
        faults |= fault
    return replace(table, groups=tuple(groups), faults=faults), PinInfo(tuple(codes))


def _page_ids(table: PageTable, pages: Sequence[Int32[Array, " _"]]) -> list[Int32[Array, " _"]]:
    if not isinstance(pages, tuple | list) or len(pages) != len(table.groups):
        raise ValueError(f"pages must be a tuple with an array of page ids for each of {len(table.groups)} groups")
    return [integers("pages", ids, (None,), "page ids [ids] for each group") for ids in pages]
