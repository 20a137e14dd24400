"""Rings from whose middle things can be taken: free pages, and wholly free spans.

A ring holds a set, and `place` says where each member stands.  Taking any members at all: those that stand in the first
places make room for the chosen ones, then the head moves past them.  O(what is taken), and what waits behind the set (a
page table's limbo) does not move.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.extents.table import Extents
from kvjax.pages.plan import writers_of_each
from kvjax.pages.table import GroupPages

_NOTED_AT_ONCE = 512
"""Pages that are counted as free in one turn of a loop: most calls free fewer, and many free none."""


def compress(values: Int32[Array, " bound"], kept: Bool[Array, " bound"], fill: int) -> Int32[Array, " bound"]:
    """The kept values moved up to the front, in order; `fill` after them."""
    rank = jnp.cumsum(kept) - kept
    target = jnp.where(kept, rank, values.shape[0])
    return jnp.full_like(values, fill).at[target].set(values, mode="drop")


def free_pages_among(group: GroupPages, extents: Extents, page: Int32[Array, " bound"]) -> Bool[Array, " bound"]:
    """Which of the ids are pages that can be taken now; any integer may be asked about."""
    place = extents.place.at[page].get(mode="fill", fill_value=0)
    stands_there = group.ring.at[place].get(mode="clip") == page
    ahead = (place - group.head) % group.num_pages
    return (page >= 0) & (page < group.num_pages) & stands_there & (ahead < group.free)


def whole_spans_among(extents: Extents, span: Int32[Array, " bound"]) -> Bool[Array, " bound"]:
    """Which of the ids are spans without a page in use or in limbo; ids out of range are not."""
    return extents.span_free.at[span].get(mode="fill", fill_value=0) == extents.span


def bring_to_head(
    ring: Int32[Array, " size"],
    place: Int32[Array, " size"],
    head: Int32[Array, ""],
    chosen: Int32[Array, " bound"],
    count: Int32[Array, ""],
) -> tuple[Int32[Array, " size"], Int32[Array, " size"]]:
    """Reorders the set at the head of a ring so that the first `count` of `chosen`, distinct members, come first."""
    size, bound = ring.shape[0], chosen.shape[0]
    number = jnp.arange(bound, dtype=jnp.int32)
    taken = number < count
    stood = place.at[chosen].get(mode="fill", fill_value=0)
    ahead = (stood - head) % size
    inside = taken & (ahead < count)
    stays = jnp.ones(bound, bool).at[jnp.where(inside, ahead, bound)].set(False, mode="drop")
    front = (head + number) % size
    there = ring.at[front].get(mode="clip")
    moving = taken & stays
    # As many chosen ones stand behind the first places as others stand in them: the two change over.
    source = compress(there, moving, size)
    target = compress(stood, taken & ~inside, size)
    (source, target, chosen, front), ring, place = lax.optimization_barrier(
        ((source, target, chosen, front), ring, place)
    )
    ring = ring.at[target].set(source, mode="drop").at[jnp.where(taken, front, size)].set(chosen, mode="drop")
    place = place.at[source].set(target, mode="drop").at[jnp.where(taken, chosen, size)].set(front, mode="drop")
    return ring, place


def bring_pages(group: GroupPages, extents: Extents, page: Int32[Array, " bound"]) -> tuple[GroupPages, Extents]:
    """Brings free pages (distinct; `num_pages` means none) to the head of the ring, in their order.

    The caller takes all of them next: spans that lose a page are no longer whole.
    """
    some = page < group.num_pages
    count = jnp.sum(some, dtype=jnp.int32)
    chosen = compress(page, some, group.num_pages)
    span = jnp.where(some, page // extents.span, extents.num_spans)
    whole = whole_spans_among(extents, span)
    broken = jnp.where(whole, span, extents.num_spans)
    once = whole & writers_of_each(broken)[1]
    broken = compress(broken, once, extents.num_spans)

    ring, place = bring_to_head(group.ring, extents.place, group.head, chosen, count)
    lost = jnp.sum(once, dtype=jnp.int32)
    spans, span_place = bring_to_head(extents.spans, extents.span_place, extents.span_head, broken, lost)
    broken, span_free = lax.optimization_barrier((broken, extents.span_free))
    extents = replace(
        extents,
        place=place,
        span_free=span_free.at[span].add(-1, mode="drop"),
        spans=spans,
        span_place=span_place,
        span_head=(extents.span_head + lost) % (2 * extents.num_spans),
    )
    return replace(group, ring=ring), extents


def note_dropped(before: GroupPages, after: GroupPages, extents: Extents, bound: int) -> tuple[GroupPages, Extents]:
    """Notes where the pages stand that a transition put at the tail of the ring, at most `bound`."""
    page, where, after = _between(before.tail, after.tail, after, bound)
    return after, replace(extents, place=extents.place.at[page].set(where, mode="drop"))


def note_freed(before: GroupPages, after: GroupPages, extents: Extents) -> tuple[GroupPages, Extents]:
    """Counts the pages whose limbo ended, a part at a time; spans that are whole again may be taken."""
    number = (after.ready - before.ready) % (2 * after.num_pages)

    def note_part(part: Int32[Array, ""], state: tuple[GroupPages, Extents]) -> tuple[GroupPages, Extents]:
        group, extents = state
        start = before.ready + part * _NOTED_AT_ONCE
        end = jnp.minimum(before.ready + number, start + _NOTED_AT_ONCE)
        page, _, group = _between(start, end, group, _NOTED_AT_ONCE)
        return group, _note_freed(page, extents)

    return lax.fori_loop(0, -(-number // _NOTED_AT_ONCE), note_part, (after, extents))


def _note_freed(page: Int32[Array, " bound"], extents: Extents) -> Extents:
    """Counts these pages (distinct; `num_pages` means none), and enters the spans that are whole with them."""
    none = extents.num_spans
    # Pages past the last whole span, and no page at all, fall out of range.
    span = jnp.minimum(page // extents.span, none)
    span_free = extents.span_free.at[span].add(1, mode="drop")
    whole = span_free.at[span].get(mode="fill", fill_value=0) == extents.span
    whole, span_free = lax.optimization_barrier((whole, span_free))
    whole &= writers_of_each(jnp.where(whole, span, none))[1]
    rank = jnp.cumsum(whole, dtype=jnp.int32) - whole
    target = jnp.where(whole, (extents.span_tail + rank) % none, none)
    return replace(
        extents,
        span_free=span_free,
        spans=extents.spans.at[target].set(span, mode="drop"),
        span_place=extents.span_place.at[jnp.where(whole, span, none)].set(target, mode="drop"),
        span_tail=(extents.span_tail + jnp.sum(whole, dtype=jnp.int32)) % (2 * none),
    )


def _between(
    start: Int32[Array, ""], end: Int32[Array, ""], group: GroupPages, bound: int
) -> tuple[Int32[Array, " bound"], Int32[Array, " bound"], GroupPages]:
    """The pages between two cursors of the ring, and where they stand; `num_pages` for padding."""
    number = jnp.arange(bound, dtype=jnp.int32)
    some = number < (end - start) % (2 * group.num_pages)
    where = (start + number) % group.num_pages
    page = jnp.where(some, group.ring.at[where].get(mode="clip"), group.num_pages)
    # The next transition must not begin to change the ring before it has been read.
    page, ring = lax.optimization_barrier((page, group.ring))
    return page, where, replace(group, ring=ring)
