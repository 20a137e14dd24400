"""Which free pages a `reserve` takes, so that rows stay in few runs.

Three ways, in this order, each for all rows at once and the later ones for what the earlier left open:

1. *Go on*: the pages right after the row's last one, as far as they are free.  Of two rows that want the same page the
   one it is nearer to gets it, then the lower row.
2. *Whole spans*: places where nobody is, which leave room to go on in later steps.  A row that needs several gets
   neighbours where the spans at hand are neighbours.
3. *Anything*: what stands at the head of the ring, sorted.  Only when no whole span is left.

Nothing is changed here.  O(bound · log bound), whatever the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.extents.free import compress, free_pages_among, whole_spans_among
from kvjax.extents.table import Extents
from kvjax.pages.table import GroupPages

Packed = tuple[Int32[Array, " bound"], Int32[Array, " bound"]]
"""(row, index): what the row takes as its index-th page; padding has row == rows."""


def choose_pages(
    group: GroupPages,
    extents: Extents,
    needed: Int32[Array, " rows"],
    last: Int32[Array, " rows"],
    packed: Packed,
) -> Int32[Array, " bound"]:
    """A free page for each packed place, none twice; `num_pages` for padding.

    Args:
      group, extents: the state; as many pages are free as are needed.
      needed: pages each row takes.
      last: the page after which a row would go on; negative for none.
      packed: `pack_rows(needed, bound)`.
    """
    row, index = packed
    rows = needed.shape[0]
    real = row < rows
    follows = jnp.where(real & (last.at[row].get(mode="clip") >= 0), last.at[row].get(mode="clip") + 1 + index, -1)
    free = real & free_pages_among(group, extents, follows)
    won = free & _nearest_claims(jnp.where(free, follows, group.num_pages), index, row)
    gone_on = needed.at[row].min(jnp.where(won, needed.at[row].get(mode="clip"), index), mode="drop")
    page = jnp.where(real & (index < gone_on.at[row].get(mode="clip")), follows, group.num_pages)

    page = _from_spans(group, extents, needed - gone_on, page, (row, index - gone_on.at[row].get(mode="clip")))
    return _from_ring(group, extents, page, real)


def _nearest_claims(
    page: Int32[Array, " bound"], index: Int32[Array, " bound"], row: Int32[Array, " bound"]
) -> Bool[Array, " bound"]:
    """Which places get the page they name: of those that name the same, the one with the least index, then row."""
    number = jnp.arange(page.shape[0], dtype=jnp.int32)
    named, _, _, place = lax.sort((page, index, row, number), num_keys=3)
    begins = jnp.concatenate([jnp.ones(1, bool), named[1:] != named[:-1]])
    return jnp.zeros(page.shape[0], bool).at[place].set(begins, unique_indices=True)


def _from_spans(
    group: GroupPages,
    extents: Extents,
    needed: Int32[Array, " rows"],
    page: Int32[Array, " bound"],
    packed: Packed,
) -> Int32[Array, " bound"]:
    """Fills places whose index is not negative from whole spans, row by row while there are any."""
    row, index = packed
    rows, bound = needed.shape[0], page.shape[0]
    most = min(extents.num_spans, rows + bound // extents.span)  # spans that rows ask for, or have gone on into
    # The spans at the head of the ring, but for those that rows have gone on into.
    entered = jnp.where(page < group.num_pages, page // extents.span, extents.num_spans)
    ahead = extents.span_place.at[entered].get(mode="fill", fill_value=0) - extents.span_head
    ahead = jnp.where(whole_spans_among(extents, entered), ahead % extents.num_spans, 2 * most)
    number = jnp.arange(2 * most, dtype=jnp.int32)
    there = extents.spans.at[(extents.span_head + number) % extents.num_spans].get(mode="clip")
    there = compress(
        there,
        jnp.ones(2 * most, bool).at[ahead].set(False, mode="drop") & (number < extents.free_spans),
        extents.num_spans,
    )
    wanted = needed // extents.span + (needed % extents.span != 0)
    before = jnp.cumsum(wanted) - wanted
    there = jnp.where(number < jnp.sum(wanted), there, extents.num_spans)
    there = jnp.sort(there)
    nth = before.at[row].get(mode="clip") + index // extents.span
    span = there.at[nth].get(mode="fill", fill_value=extents.num_spans)
    takes = (row < rows) & (index >= 0) & (span < extents.num_spans)
    return jnp.where(takes, span * extents.span + index % extents.span, page)


def _from_ring(
    group: GroupPages, extents: Extents, page: Int32[Array, " bound"], real: Bool[Array, " bound"]
) -> Int32[Array, " bound"]:
    """Fills the places left open from the head of the ring, in ascending order of page."""
    bound = page.shape[0]
    number = jnp.arange(bound, dtype=jnp.int32)
    left = real & (page == group.num_pages)
    ahead = (extents.place.at[page].get(mode="fill", fill_value=0) - group.head) % group.num_pages
    ahead = jnp.where(page < group.num_pages, ahead, bound)
    there = group.ring.at[(group.head + number) % group.num_pages].get(mode="clip")
    untaken = jnp.ones(bound, bool).at[ahead].set(False, mode="drop")
    there = compress(there, untaken & (number < group.free), group.num_pages)
    there = jnp.sort(jnp.where(number < jnp.sum(left), there, group.num_pages))
    rank = jnp.cumsum(left) - left
    return jnp.where(left, there.at[rank].get(mode="clip"), page)
