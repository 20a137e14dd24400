"""Holders of pages: taking pages from the ring, counting holders, giving back pages that lost their last one.

Every function reads before it writes and puts `lax.optimization_barrier` between the two.  Without it XLA moves reads
past writes and keeps a copy of the whole refcount array for them: O(pool) a step.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.pages.status import Fault
from kvjax.pages.table import GroupPages


def any_fault(condition: Bool[Array, " *shape"], fault: Fault) -> Int32[Array, ""]:
    """The fault's bit if the condition holds anywhere, else 0."""
    return jnp.where(jnp.any(condition), jnp.int32(fault), jnp.int32(0))


def take_pages(
    group: GroupPages, count: Int32[Array, ""], bound: int
) -> tuple[GroupPages, Int32[Array, " bound"], Int32[Array, ""]]:
    """Takes `count` free pages (count ≤ bound and ≤ free) and gives each its first holder.

    Returns the group, the ids (`num_pages` in the places past `count`) and fault bits.
    """
    place = jnp.arange(bound, dtype=jnp.int32)
    ids = group.ring[(group.head + place) % group.num_pages]
    ids = jnp.where(place < count, ids, group.num_pages)
    before = group.refcount.at[ids].get(mode="fill", fill_value=0)
    before, refcount = lax.optimization_barrier((before, group.refcount))
    # add, not set: a page that somebody still holds stays counted, and the fault says so.
    refcount = refcount.at[ids].add(1, mode="drop")
    head = (group.head + count) % (2 * group.num_pages)
    return replace(group, refcount=refcount, head=head), ids, any_fault(before != 0, Fault.FREE_PAGE_HELD)


def change_holders(
    group: GroupPages, gained: Int32[Array, " gains"], lost: Int32[Array, " losses"]
) -> tuple[GroupPages, Int32[Array, ""]]:
    """One holder more for each id in `gained`, one less for each in `lost`; pages left without any go to limbo.

    Ids may repeat, in and across the two lists; `num_pages` means none.  The counts change by commutative scatters, so
    the result does not depend on order, backend or repeats.

    Returns the group and fault bits.  O(gains + losses).
    """
    none = group.num_pages
    before = group.refcount.at[gained].get(mode="fill", fill_value=1)
    before, refcount = lax.optimization_barrier((before, group.refcount))
    refcount = refcount.at[gained].add(1, mode="drop").at[lost].add(-1, mode="drop")

    left = refcount.at[lost].get(mode="fill", fill_value=1)
    left, refcount = lax.optimization_barrier((left, refcount))
    faults = any_fault(before <= 0, Fault.MAPPED_PAGE_UNHELD) | any_fault(left < 0, Fault.UNDERFLOW)

    # A page that stands in `lost` several times must enter the ring once.  Its count is zero now, so the count itself
    # serves as scratch: the largest place that names the page wins, and takes its mark away again.
    place = jnp.arange(1, lost.shape[0] + 1, dtype=jnp.int32)
    orphan = jnp.where(left == 0, lost, none)
    refcount = refcount.at[orphan].max(place, mode="drop")
    winner = refcount.at[orphan].get(mode="fill", fill_value=0)
    winner, refcount = lax.optimization_barrier((winner, refcount))
    freed = jnp.where(winner == place, orphan, none)
    refcount = refcount.at[freed].add(-place, mode="drop")
    return _give_back(replace(group, refcount=refcount), freed), faults


def _give_back(group: GroupPages, freed: Int32[Array, " losses"]) -> GroupPages:
    """Puts the ids (distinct; `num_pages` means none) at the ring's tail."""
    some = freed < group.num_pages
    rank = jnp.cumsum(some) - some
    target = jnp.where(some, (group.tail + rank) % group.num_pages, group.num_pages)
    tail = (group.tail + jnp.sum(some, dtype=jnp.int32)) % (2 * group.num_pages)
    return replace(group, ring=group.ring.at[target].set(freed, mode="drop"), tail=tail)
