"""Broken extents: the real code with one rule taken out, each of which the walk must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax.numpy as jnp

from kvjax.extents import choose, compaction, transitions
from tests.extents.walk import ExtentWalk, compiled, fresh

LIMIT = 400
"""Steps after which a twin counts as not caught."""


@dataclass(frozen=True)
class Twin:
    """A way to break extents: `broken` makes the function `name` of `module` from the real one.

    Attributes:
      broken: its docstring says what is wrong.
      operations: the calls that reach it, to be traced anew.
      setting: the sizes that are walked.
    """

    broken: Callable[[Any], Any]
    module: Any
    name: str
    operations: tuple[str, ...]
    setting: str = "few runs"

    def caught(self, seed: int = 0) -> bool:
        with mock.patch.object(self.module, self.name, self.broken(getattr(self.module, self.name))):
            walk = ExtentWalk(self.setting, seed, compiled() | {name: fresh(name) for name in self.operations})
            try:
                for _ in range(LIMIT):
                    walk.step()
            except AssertionError:
                return True
        return False


def a_page_in_limbo_counts_as_free(real):
    """The page after a row's last one is taken although a step in flight may touch it."""
    return lambda group, extents, page: real(replace(group, ready=group.tail), extents, page)


def two_rows_get_one_page(real):
    """Every row that wants a page gets it."""
    return lambda page, index, row: jnp.ones_like(real(page, index, row))


def spans_entered_are_handed_out_again(real):
    """A span that one row goes on into is given to another as a whole one."""
    return lambda extents, span: jnp.zeros_like(real(extents, span))


def taken_pages_are_not_counted(real):
    """A span that lost a page still counts as whole."""

    def brought(group, extents, page):
        group, after = real(group, extents, page)
        return group, replace(after, span_free=extents.span_free)

    return brought


def places_of_dropped_pages_are_stale(real):
    """A page is looked for where it stood when it was last taken."""
    return lambda before, after, extents, bound: (after, extents)


def freed_pages_are_not_counted(real):
    """Spans are never whole again."""
    return lambda before, after, extents: (after, extents)


def runs_are_not_cut(real):
    """A row that gives up pages keeps its runs."""
    return lambda runs, end: runs


def too_many_runs_are_accepted(real):
    """The list of runs overflows."""
    return lambda runs, entries: jnp.zeros_like(real(runs, entries))


def a_move_leaves_a_holder_behind(real):
    """The last table entry is not changed; the page it names goes to limbo under it."""

    def written(group, row, logical, page):
        last = jnp.arange(row.shape[0]) == jnp.sum(row < group.pages.shape[0]) - 1
        return real(group, jnp.where(last, group.pages.shape[0], row), logical, page)

    return written


def the_source_is_free_at_once(real):
    """What a compaction leaves behind does not pass through limbo."""

    def changed(group, gained, lost):
        after, faults = real(group, gained, lost)
        return replace(after, ready=after.tail), faults

    return changed


_GROWING = ("reserve", "pages_needed")

TWINS = (
    Twin(a_page_in_limbo_counts_as_free, choose, "free_pages_among", _GROWING),
    Twin(two_rows_get_one_page, choose, "_nearest_claims", _GROWING, "small pages"),
    Twin(spans_entered_are_handed_out_again, choose, "whole_spans_among", _GROWING),
    Twin(taken_pages_are_not_counted, transitions, "bring_pages", _GROWING),
    Twin(places_of_dropped_pages_are_stale, transitions, "note_dropped", ("release", "truncate", "reorder", "unpin")),
    Twin(freed_pages_are_not_counted, transitions, "note_freed", ("advance",)),
    Twin(runs_are_not_cut, transitions, "shorten", ("truncate", "release")),
    Twin(too_many_runs_are_accepted, transitions, "runs_added", _GROWING),
    Twin(a_move_leaves_a_holder_behind, compaction, "write_entries", ("compact",)),
    Twin(the_source_is_free_at_once, compaction, "change_holders", ("compact",)),
)
