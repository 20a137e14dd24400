"""Broken twins: the real code with one rule of ownership taken out, and how soon the checks notice.

    python -m tests.pages.twins [--seeds 3]

Each twin breaks one of the six laws.  It is driven by the random walk over the page table, or by the one over a whole
cache where the law is about bytes, until a comparison fails; the table says after how many transitions.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import kvjax.attention.tiled
import kvjax.cache
from kvjax import pages
from kvjax.pages import Status, grow, holders, mapping, pins, plan, share, shrink
from tests import cache_walk
from tests.pages import harness
from tests.pages.walk import RandomWalk

LAWS = (
    "refcount = holders",
    "a shared page is copied before it is written",
    "no page is reused before its last use is complete",
    "what is given up is given up exactly once",
    "table and length move together",
    "what was never written is never read",
)
LIMIT = 1000
"""Steps after which a twin counts as not caught."""


@dataclass(frozen=True)
class Twin:
    """A way to break a law.

    Attributes:
      law: number of the law it breaks, from 1.
      broken: makes the broken function from the real one; its docstring says what is wrong.
      targets: (module, name) of each place where the function is looked up.
      operations: the calls that reach it, to be traced anew.
      bytes: driven by the walk over a whole cache.
    """

    law: int
    broken: Callable[[Any], Any]
    targets: tuple[tuple[Any, str], ...]
    operations: tuple[str, ...]
    bytes: bool = False

    @property
    def name(self) -> str:
        return self.broken.__name__.replace("_", " ")

    def caught_after(self, seed: int) -> int | None:
        """Transitions until a check failed, that one included; None if none did within LIMIT steps."""
        with ExitStack() as stack:
            for module, name in self.targets:
                stack.enter_context(mock.patch.object(module, name, self.broken(getattr(module, name))))
            try:
                if self.bytes:
                    operations = cache_walk.compiled() | {name: cache_walk.fresh(name) for name in self.operations}
                    walk = cache_walk.CacheWalk(cache_walk.make_cache(3, 24), seed, operations)
                    walk.run(LIMIT // 20)
                else:
                    operations = harness.compiled() | {name: harness.fresh(name) for name in self.operations}
                    table_walk = RandomWalk("two groups", seed, operations)
                    for _ in range(LIMIT):
                        table_walk.step()
            except AssertionError:
                return walk.transitions if self.bytes else table_walk.harness.transitions
        return None


def refcount_clamped(real):
    """Holders that leave are not counted, so that a page never becomes free."""
    return lambda group, gained, lost: real(group, gained, jnp.full_like(lost, group.num_pages))


def sharing_uncounted(real):
    """Rows that take a page another row holds are not counted."""
    return lambda group, gained, lost: real(group, jnp.full_like(gained, group.num_pages), lost)


def copy_on_write_skipped(real):
    """A shared tail is written in place."""

    def planned(*args):
        outcome = real(*args)
        groups = tuple(replace(group, copy=jnp.zeros_like(group.copy)) for group in outcome.groups)
        return replace(outcome, groups=groups)

    return planned


def last_writer_copies_too(real):
    """Every holder that writes copies; the page they all left stays counted as held by the last."""
    return lambda page: (real(page)[0], jnp.zeros(page.shape, bool), real(page)[2])


def bytes_not_copied(real):
    """The new table becomes visible, and nothing was copied."""
    return lambda pool, *args: pool


def side_tensor_not_copied(real):
    """Keys and values are copied, the scales beside them are not."""
    return lambda pool, *args: pool if pool.shape[-1] == 1 else real(pool, *args)


def first_layer_copied_only(real):
    """The pages of other layers stay behind."""
    return lambda pool, num_pages, *args: pool.at[:num_pages].set(real(pool[:num_pages], num_pages, *args))


def limbo_skipped(real):
    """Pages are free as soon as they are dropped, at the next advance, whatever epoch is complete."""

    def advanced(table, completed):
        table, info = real(table, completed)
        return replace(table, groups=tuple(replace(g, ready=g.tail) for g in table.groups)), info

    return advanced


def fence_one_epoch_early(real):
    """Pages dropped in the epoch after the completed one are freed with it."""

    def advanced(table, completed):
        after, info = real(table, completed)
        early, _ = real(table, jnp.minimum(completed + 1, table.epoch))
        groups = tuple(replace(g, ready=e.ready) for g, e in zip(after.groups, early.groups, strict=True))
        return replace(after, groups=groups), info

    return advanced


def newest_page_taken_first(real):
    """Pages are taken from the tail of the ring, where those in limbo stand."""

    def taken(group, count, bound):
        moved = replace(group, head=(group.tail - count) % (2 * group.num_pages))
        after, ids, faults = real(moved, count, bound)
        return replace(after, head=(group.head + count) % (2 * group.num_pages)), ids, faults

    return taken


def pins_ignored(real):
    """A pin is noted, and does not hold the page."""
    return lambda group, gained, lost: (group, jnp.int32(0))


def double_release_allowed(real):
    """A row released keeps its line of the table, and may be released again."""

    def released(table, rows, *, max_pages):
        after, info = real(table, rows, max_pages=max_pages)
        groups = tuple(
            replace(new, pages=old.pages, end=old.end) for new, old in zip(after.groups, table.groups, strict=True)
        )
        return replace(after, groups=groups, reserved=table.reserved), info

    return released


def dropped_twice(real):
    """Each page that a row gives up loses two holders."""
    return lambda group, gained, lost: real(group, gained, jnp.concatenate([lost, lost]))


def freed_once_a_mention(real):
    """A page dropped by two rows in one call enters the ring twice."""

    def changed(group, gained, lost):
        after, faults = real(group, gained, lost)
        zero = after.refcount.at[lost].get(mode="fill", fill_value=1) == 0
        back = replace(after, tail=group.tail, ring=group.ring)
        return holders._give_back(back, jnp.where(zero, lost, group.num_pages)), faults

    return changed


def rollback_keeps_pages(real):
    """A truncated row is shorter, and what lay beyond is not given back."""

    def truncated(table, length, *, max_pages, rows=None):
        after, info = real(table, length, max_pages=max_pages, rows=rows)
        return replace(table, length=after.length, reserved=after.reserved), info

    return truncated


def length_moved_before_the_table(real):
    """A refused row's reserved end moves all the same."""

    def reserved(table, tokens, **keywords):
        after, info = real(table, tokens, **keywords)
        return replace(after, reserved=jnp.maximum(after.reserved, table.length + jnp.maximum(tokens, 0))), info

    return reserved


def commit_past_what_was_reserved(real):
    """Lengths move past the positions that have a page."""

    def committed(table, tokens):
        _, info = real(table, tokens)
        return replace(table, length=table.length + jnp.maximum(tokens, 0)), replace(
            info, status=jnp.where(tokens < 0, Status.NOT_RESERVED, Status.OK)
        )

    return committed


def pages_dropped_but_not_length(real):
    """Pages go, and the committed length stays."""

    def shrunk(table, kept, status, bound):
        after, info = real(table, kept, status, bound)
        return replace(after, length=table.length), info

    return shrunk


def served_past_a_refusal(real):
    """Rows after the first that does not fit are told they are served, with fewer pages than they need."""

    def needed(group, by_order, length, tokens, asking):
        need = real(group, by_order, length, tokens, asking)
        fits = jnp.cumsum(need.needed) <= group.free
        return replace(need, fresh=jnp.where(fits, need.fresh, 0))

    return needed


def causal_mask_dropped(real):
    """Every query sees what the last one of its tile sees."""

    def seen(*arguments):
        start, end = real(*arguments)
        return start, jnp.where(end > 0, end.max(axis=1, keepdims=True), 0)

    return seen


def mask_one_position_late(real):
    """A query sees one position more than there is."""

    def seen(*arguments):
        start, end = real(*arguments)
        return start, end + (end > 0)

    return seen


def value_mask_dropped(real):
    """Weights past the context are zero, and 0 × NaN is NaN."""
    return lambda v, seen: v


_SHRINKING = ((mapping, "change_holders"),), ("truncate", "release")
_SHARING = ((share, "change_holders"),), ("fork", "reorder", "adopt")
_ATTENTION = kvjax.attention.tiled

TWINS = (
    Twin(1, refcount_clamped, *_SHRINKING),
    Twin(1, sharing_uncounted, *_SHARING),
    Twin(1, pins_ignored, ((pins, "change_holders"),), ("pin", "unpin")),
    Twin(2, copy_on_write_skipped, ((grow, "plan_reserve"),), ("reserve", "pages_needed")),
    Twin(2, last_writer_copies_too, ((plan, "writers_of_each"),), ("reserve", "pages_needed")),
    Twin(2, bytes_not_copied, ((kvjax.cache, "copy_pages"),), ("reserve",), bytes=True),
    Twin(2, side_tensor_not_copied, ((kvjax.cache, "copy_pages"),), ("reserve",), bytes=True),
    Twin(2, first_layer_copied_only, ((kvjax.cache, "copy_pages"),), ("reserve",), bytes=True),
    Twin(3, limbo_skipped, ((pages, "advance"),), ("advance",)),
    Twin(3, fence_one_epoch_early, ((pages, "advance"),), ("advance",)),
    Twin(3, newest_page_taken_first, ((grow, "take_pages"),), ("reserve",)),
    Twin(3, pins_ignored, ((pins, "change_holders"),), ("pin", "unpin")),
    Twin(4, double_release_allowed, ((pages, "release"),), ("release",)),
    Twin(4, dropped_twice, *_SHRINKING),
    Twin(4, freed_once_a_mention, *_SHRINKING),
    Twin(4, rollback_keeps_pages, ((pages, "truncate"),), ("truncate",)),
    Twin(5, length_moved_before_the_table, ((pages, "reserve"),), ("reserve",)),
    Twin(5, commit_past_what_was_reserved, ((pages, "commit"),), ("commit",)),
    Twin(5, pages_dropped_but_not_length, ((shrink, "_shrink"),), ("truncate", "release")),
    Twin(5, served_past_a_refusal, ((plan, "_group_need"),), ("reserve", "pages_needed")),
    Twin(6, causal_mask_dropped, ((_ATTENTION, "seen"),), ("attend",), bytes=True),
    Twin(6, mask_one_position_late, ((_ATTENTION, "seen"),), ("attend",), bytes=True),
    Twin(6, value_mask_dropped, ((_ATTENTION, "seen_values"),), ("attend",), bytes=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="walks a twin (default: %(default)s)")
    options = parser.parse_args()
    missed = 0
    print(f"{'law':50s} {'broken twin':32s} caught after … transitions (median, each walk)")
    for twin in TWINS:
        found = [twin.caught_after(seed) for seed in range(options.seeds)]
        missed += None in found
        middle = "not caught" if None in found else f"{median(found):g}"
        print(f"{twin.law} {LAWS[twin.law - 1]:48s} {twin.name:32s} {middle:>10s}   {found}", flush=True)
    print(f"{len(TWINS) - missed} of {len(TWINS)} twins caught in every walk")
    return missed


if __name__ == "__main__":
    sys.exit(main())
