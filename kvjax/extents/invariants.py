"""The audit of an extent table: the page table's, and that runs, places and spans say what the page table says."""

from __future__ import annotations

import jax
import numpy as np

from kvjax import pages
from kvjax.extents.table import Extents, ExtentTable, Runs
from kvjax.pages.table import GroupPages

_MOST = 8
"""Findings listed of one kind."""


def check_invariants(extents: ExtentTable) -> list[str]:
    """What is violated, a line each; empty when the table is sound.  On the host, O(rows · width + pool).

    Checked, beside `kvjax.pages.check_invariants`: no run is empty and the runs of a row, written out, are its pages;
    `place` says where each page of the ring stands; `span_free` counts the free pages of each span; `spans` names each
    wholly free span once, and `span_place` says where.
    """
    extents = jax.tree.map(np.asarray, extents)
    found = pages.check_invariants(extents.table)
    for index, (group, extent) in enumerate(zip(extents.table.groups, extents.extents, strict=True)):
        lines = [*_runs(group, extent.runs), *_places(group, extent), *_spans(group, extent)]
        found += [f"group {index}: {line}" for line in lines]
    return found


def pages_of_runs(runs: Runs, row: int) -> np.ndarray:
    """The physical pages of a row, written out from its runs.  On the host."""
    number = int(runs.num_runs[row])
    counts = np.diff(np.asarray(runs.ends[row, :number]), prepend=0)
    return np.concatenate(
        [
            np.arange(int(start), int(start) + count)
            for start, count in zip(runs.starts[row, :number], counts, strict=True)
        ]
        or [np.zeros(0, int)]
    )


def _runs(group: GroupPages, runs: Runs) -> list[str]:
    found = []
    for row in range(runs.rows):
        if not 0 <= runs.num_runs[row] <= runs.max_runs:
            found.append(f"row {row}: num_runs={runs.num_runs[row]} is outside [0, {runs.max_runs}]")
            continue
        ends = runs.ends[row, : runs.num_runs[row]]
        mapped = group.pages[row, : group.end[row]]
        if (np.diff(ends, prepend=0) <= 0).any():
            found.append(f"row {row}: run ends {ends[:_MOST].tolist()} do not ascend")
        elif (ends[-1] if len(ends) else 0) != len(mapped):
            found.append(f"row {row}: its runs have {ends[-1] if len(ends) else 0} pages, the table {len(mapped)}")
        elif (pages_of_runs(runs, row) != mapped).any():
            wrong = np.flatnonzero(pages_of_runs(runs, row) != mapped)[0]
            found.append(f"row {row}: logical page {wrong} is {mapped[wrong]}, its run says otherwise")
    return found[:_MOST]


def _places(group: GroupPages, extent: Extents) -> list[str]:
    number = (int(group.tail) - int(group.head)) % (2 * group.num_pages)
    where = (int(group.head) + np.arange(number)) % group.num_pages
    page = group.ring[where]
    wrong = np.flatnonzero(extent.place[page] != where)[:_MOST]
    return [f"page {page[i]} stands at {where[i]}, place says {extent.place[page[i]]}" for i in wrong]


def _spans(group: GroupPages, extent: Extents) -> list[str]:
    number = int(group.free)
    free = group.ring[(int(group.head) + np.arange(number)) % group.num_pages]
    inside = free[free < extent.num_spans * extent.span]
    counted = np.bincount(inside // extent.span, minlength=extent.num_spans)
    found = [
        f"span {span}: span_free={extent.span_free[span]} but {counted[span]} of its pages are free"
        for span in np.flatnonzero(counted != extent.span_free)[:_MOST]
    ]
    where = (int(extent.span_head) + np.arange(int(extent.free_spans))) % extent.num_spans
    listed = extent.spans[where]
    if sorted(listed.tolist()) != np.flatnonzero(counted == extent.span).tolist():
        found.append(f"{len(listed)} whole spans are listed, {np.sum(counted == extent.span)} are whole, or not those")
    elif (extent.span_place[listed] != where).any():
        found.append("span_place does not say where the whole spans stand")
    return found
