"""Keeping the lists of runs as rows grow and shrink, without reading the page table again.

O(rows · log max_runs + entries).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from kvjax.extents.table import Runs

NO_PAGE = -2
"""Before a row's first page: no page number follows it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Entries:
    """Pages to be appended to rows, row by row and in logical order within each; padding has row == rows.

    Attributes:
      row, logical, page: physical `page` becomes the row's `logical` one.
      first: the first entry of its row.
    """

    row: Int32[Array, " bound"]
    logical: Int32[Array, " bound"]
    page: Int32[Array, " bound"]
    first: Bool[Array, " bound"]

    def only(self, rows: Bool[Array, " rows"]) -> Entries:
        """Those of the given rows; the others become padding."""
        kept = rows.at[self.row].get(mode="fill", fill_value=False)
        return replace(self, row=jnp.where(kept, self.row, rows.shape[0]), first=self.first & kept)


def last_page(runs: Runs) -> Int32[Array, " rows"]:
    """The physical page of each row's last logical page; NO_PAGE for an empty row."""
    row = jnp.arange(runs.rows, dtype=jnp.int32)
    last = runs.num_runs - 1
    before = jnp.where(last > 0, runs.ends.at[row, last - 1].get(mode="clip"), 0)
    page = runs.starts.at[row, last].get(mode="clip") + runs.ends.at[row, last].get(mode="clip") - before - 1
    return jnp.where(last >= 0, page, NO_PAGE)


def shorten(runs: Runs, end: Int32[Array, " rows"]) -> Runs:
    """Cuts each row's runs at logical page `end`; at or past its present end, nothing changes."""
    row = jnp.arange(runs.rows, dtype=jnp.int32)
    # Runs that end at or before `end` are whole: a binary search for how many.
    whole = jnp.zeros(runs.rows, jnp.int32)
    for bit in reversed(range(runs.max_runs.bit_length())):
        probe = whole + (1 << bit)
        ends = runs.ends.at[row, probe - 1].get(mode="clip")
        whole = jnp.where((probe <= runs.num_runs) & (ends <= end), probe, whole)
    reached = jnp.where(whole > 0, runs.ends.at[row, whole - 1].get(mode="clip"), 0)
    cut = (whole < runs.num_runs) & (reached < end)
    (whole, cut), ends = lax.optimization_barrier(((whole, cut), runs.ends))
    ends = ends.at[jnp.where(cut, row, runs.rows), whole].set(end, mode="drop")
    return replace(runs, ends=ends, num_runs=whole + cut)


def begins_run(runs: Runs, entries: Entries) -> Bool[Array, " bound"]:
    """Entries that do not follow the page before them."""
    before = jnp.concatenate([jnp.full(1, NO_PAGE, jnp.int32), entries.page[:-1]])
    before = jnp.where(entries.first, last_page(runs).at[entries.row].get(mode="clip"), before)
    return (entries.row < runs.rows) & (entries.page != before + 1)


def runs_added(runs: Runs, entries: Entries) -> Int32[Array, " rows"]:
    """Runs each row would have more after `append`."""
    begins = begins_run(runs, entries)
    return jnp.zeros(runs.rows, jnp.int32).at[entries.row].add(begins, mode="drop")


def append(runs: Runs, entries: Entries) -> Runs:
    """Appends pages to the rows; no row may come to more than `max_runs` runs."""
    row, none = entries.row, runs.rows
    begins = begins_run(runs, entries)
    nth = jnp.cumsum(begins, dtype=jnp.int32)
    before_row = jnp.zeros(none, jnp.int32)
    before_row = before_row.at[jnp.where(entries.first, row, none)].set(nth - begins, mode="drop")
    added = jnp.zeros(none, jnp.int32).at[row].add(begins, mode="drop")
    run = runs.num_runs.at[row].get(mode="clip") - 1 + nth - before_row.at[row].get(mode="clip")
    # The last entry of a run: what follows begins another, or belongs to another row.
    follows = jnp.concatenate([row[1:], jnp.full(1, none, jnp.int32)]) == row
    ends_run = ~follows | jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    (run, begins, ends_run), runs = lax.optimization_barrier(((run, begins, ends_run), runs))
    return Runs(
        starts=runs.starts.at[jnp.where(begins, row, none), run].set(entries.page, mode="drop"),
        ends=runs.ends.at[jnp.where(ends_run, row, none), run].set(entries.logical + 1, mode="drop"),
        num_runs=runs.num_runs + added,
    )


def replace_page(
    runs: Runs, rows: Bool[Array, " rows"], logical: Int32[Array, " rows"], page: Int32[Array, " rows"]
) -> Runs:
    """Puts another page in the middle of a run of the given rows, which splits it in up to three.

    O(rows · max_runs): rare, a shared tail with reserved pages behind it.  There must be room for two runs more.
    """
    slot = jnp.arange(runs.max_runs, dtype=jnp.int32)
    begins = jnp.concatenate([jnp.zeros((runs.rows, 1), jnp.int32), runs.ends[:, :-1]], axis=1)
    exists = slot < runs.num_runs[:, None]
    holds = exists & (begins <= logical[:, None]) & (logical[:, None] < runs.ends)
    at = jnp.argmax(holds, axis=1).astype(jnp.int32)[:, None]
    begin, end, start = (jnp.take_along_axis(each, at, axis=1)[:, 0] for each in (begins, runs.ends, runs.starts))
    head, tail = (logical > begin).astype(jnp.int32), (logical + 1 < end).astype(jnp.int32)

    shifted = jnp.where(slot > at, slot - (head + tail)[:, None], slot)
    starts = jnp.take_along_axis(runs.starts, jnp.maximum(shifted, 0), axis=1)
    ends = jnp.take_along_axis(runs.ends, jnp.maximum(shifted, 0), axis=1)
    parts = (
        (jnp.where(head > 0, 0, runs.max_runs), start, logical),
        (head, page, logical + 1),
        (jnp.where(tail > 0, head + 1, runs.max_runs), start + logical + 1 - begin, end),
    )
    row = jnp.where(rows, jnp.arange(runs.rows, dtype=jnp.int32), runs.rows)
    for offset, part_start, part_end in parts:
        column = at[:, 0] + offset
        starts = starts.at[row, column].set(part_start, mode="drop")
        ends = ends.at[row, column].set(part_end, mode="drop")
    return Runs(
        starts=jnp.where(rows[:, None], starts, runs.starts),
        ends=jnp.where(rows[:, None], ends, runs.ends),
        num_runs=runs.num_runs + jnp.where(rows, head + tail, 0),
    )
