"""Extents: a page table whose rows are short lists of runs of adjacent pages, for kernels that copy a run at a time."""

from kvjax.extents.compaction import CompactInfo, Moves, compact
from kvjax.extents.invariants import check_invariants, pages_of_runs
from kvjax.extents.planning import CompactionLimits, plan_compaction
from kvjax.extents.table import Extents, ExtentShape, ExtentTable, Runs, make_extent_table
from kvjax.extents.transitions import (
    adopt,
    advance,
    commit,
    fork,
    pages_needed,
    pin,
    release,
    reorder,
    reserve,
    truncate,
    unpin,
)

__all__ = [
    "CompactInfo",
    "CompactionLimits",
    "ExtentShape",
    "ExtentTable",
    "Extents",
    "Moves",
    "Runs",
    "adopt",
    "advance",
    "check_invariants",
    "commit",
    "compact",
    "fork",
    "make_extent_table",
    "pages_needed",
    "pages_of_runs",
    "pin",
    "plan_compaction",
    "release",
    "reorder",
    "reserve",
    "truncate",
    "unpin",
]
