"""Reading and writing many entries of the page table at once, from packed work lists under a static bound.

A dense pass over rows × width would touch the whole table for one short row.  A work list names just the entries that
change: `pack_rows` lists (row, logical page), padding has row == rows and falls out of range everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.inputs import INT32_MAX, static_size
from kvjax.packing import pack_rows
from kvjax.pages.holders import any_fault, change_holders
from kvjax.pages.status import Fault
from kvjax.pages.table import GroupPages

_WRITES_AT_ONCE = 512
"""Table entries written by one scatter.  For 1,024 and more the TPU compiler lays a large table out flat, and so copies
it; for 768 it does not."""


def read_entries(
    group: GroupPages, row: Int32[Array, " bound"], logical: Int32[Array, " bound"]
) -> Int32[Array, " bound"]:
    """Physical pages of (row, logical page); `num_pages` for padding."""
    return group.pages.at[row, logical % group.width].get(mode="fill", fill_value=group.num_pages)


def write_entries(
    group: GroupPages, row: Int32[Array, " bound"], logical: Int32[Array, " bound"], page: Int32[Array, " bound"]
) -> GroupPages:
    """Enters physical pages at (row, logical page), in place; padding is dropped.  No entry may be named twice.

    The caller has put a barrier between what it read of the table and this.
    """
    column = logical % group.width
    bound = page.shape[0]

    def write_from(start: Int32[Array, ""] | int, pages: Int32[Array, "rows width"]) -> Int32[Array, "rows width"]:
        part = [lax.dynamic_slice_in_dim(each, start, min(bound, _WRITES_AT_ONCE)) for each in (row, column, page)]
        return pages.at[part[0], part[1]].set(part[2], mode="drop")

    if bound <= _WRITES_AT_ONCE:
        return replace(group, pages=write_from(0, group.pages))
    # The last part is moved back to end at the bound: what it writes twice, it writes alike.
    last = bound - _WRITES_AT_ONCE
    pages = lax.fori_loop(
        0,
        -(-bound // _WRITES_AT_ONCE),
        lambda part, pages: write_from(jnp.minimum(part * _WRITES_AT_ONCE, last), pages),
        group.pages,
    )
    return replace(group, pages=pages)


def within_bound(counts: Int32[Array, " rows"], bound: int) -> Bool[Array, " rows"]:
    """Rows whose entries find room in a work list of `bound` places, in row order.

    A row larger than the whole bound takes no room from the others; after the first that no longer fits, only rows
    that ask for nothing pass.
    """
    bound = static_size("max_pages", bound)
    if counts.shape[0] * bound > INT32_MAX:
        raise ValueError(
            f"max_pages={bound} × {counts.shape[0]} rows exceeds 32-bit counts; make several calls with a smaller one"
        )
    alone = counts <= bound
    return alone & ((jnp.cumsum(jnp.where(alone, counts, 0)) <= bound) | (counts == 0))


def unmap(
    group: GroupPages, start: Int32[Array, " rows"], counts: Int32[Array, " rows"], bound: int
) -> tuple[GroupPages, Int32[Array, ""]]:
    """Takes logical pages [start, start + counts) from each row; pages left without a holder go to limbo.

    `first` and `end` stay as they are.  Returns the group and fault bits.
    """
    row, index = pack_rows(counts, bound)
    logical = start.at[row].get(mode="clip") + index
    lost = read_entries(group, row, logical)
    lost, pages = lax.optimization_barrier((lost, group.pages))
    group = write_entries(replace(group, pages=pages), row, logical, jnp.full_like(lost, group.num_pages))
    bad = any_fault((row < counts.shape[0]) & (lost >= group.num_pages), Fault.MAPPED_PAGE_UNHELD)
    nothing = jnp.zeros(0, jnp.int32)
    group, faults = change_holders(group, nothing, lost)
    return group, faults | bad
