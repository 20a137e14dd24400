"""What extents keep beside a page table, found from the table alone: for a table that comes from a file."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.extents.table import Extents, Runs
from kvjax.pages import PageTable
from kvjax.pages.table import GroupPages


def find_extents(table: PageTable, empty: Sequence[Extents]) -> tuple[Extents, ...]:
    """The extents that belong to a sound table.  On the host, O(rows · width + pool).

    Args:
      table: the table.
      empty: extents of each group, whose sizes and devices the result has.

    Raises:
      ValueError: a row in more runs than the lists hold.
    """
    found = []
    for index, (group, extent) in enumerate(zip(table.groups, empty, strict=True)):
        group = jax.tree.map(np.asarray, group)
        runs = [_runs_of(row[:end]) for row, end in zip(group.pages, group.end, strict=True)]
        most = max(len(row) for row in runs)
        if most > extent.runs.max_runs:
            raise ValueError(
                f"group {index}: a row lies in {most} runs and max_runs={extent.runs.max_runs}; pass "
                f"ExtentOptions(max_runs={most}) or more"
            )
        found.append(_placed(_listed(runs, extent), group, extent))
    return tuple(found)


def _runs_of(pages: np.ndarray) -> np.ndarray:
    """(start, end) of each run of a row: Int[runs, 2]."""
    begins = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    return np.stack([pages[begins], np.append(begins, len(pages))[1:]], axis=1)


def _listed(runs: Sequence[np.ndarray], extent: Extents) -> Runs:
    starts, ends = (np.zeros(extent.runs.starts.shape, np.int32) for _ in range(2))
    for row, mine in enumerate(runs):
        starts[row, : len(mine)], ends[row, : len(mine)] = mine.T
    return Runs(jnp.asarray(starts), jnp.asarray(ends), jnp.array([len(mine) for mine in runs], jnp.int32))


def _placed(runs: Runs, group: GroupPages, extent: Extents) -> Extents:
    """The extents with these runs, on the devices of `extent`."""
    place, span_place = np.zeros(group.num_pages, np.int32), np.zeros(extent.num_spans, np.int32)
    where = (int(group.head) + np.arange(int(group.free) + int(group.limbo))) % group.num_pages
    place[group.ring[where]] = where
    free = group.ring[where[: int(group.free)]]
    inside = free[free < extent.num_spans * extent.span]
    span_free = np.bincount(inside // extent.span, minlength=extent.num_spans).astype(np.int32)
    whole = np.flatnonzero(span_free == extent.span).astype(np.int32)
    spans = np.zeros(extent.num_spans, np.int32)
    spans[: len(whole)] = whole
    span_place[whole] = np.arange(len(whole))
    found = Extents(
        runs=runs,
        place=jnp.asarray(place),
        span_free=jnp.asarray(span_free),
        spans=jnp.asarray(spans),
        span_place=jnp.asarray(span_place),
        span_head=jnp.int32(0),
        span_tail=jnp.int32(len(whole)),
        span=extent.span,
    )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), found, extent)
