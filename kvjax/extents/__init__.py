"""Extents: a page table whose rows are short lists of runs of adjacent pages, for kernels that copy a run at a time."""

from kvjax.extents.compaction import CompactInfo, Moves, compact
from kvjax.extents.finding import find_extents
from kvjax.extents.invariants import check_invariants, pages_of_runs
from kvjax.extents.options import ExtentOptions
from kvjax.extents.planning import CompactionLimits, plan_compaction
from kvjax.extents.table import Extents, ExtentShape, ExtentTable, Runs, make_extent_table, make_extents
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
    "ExtentOptions",
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
    "find_extents",
    "fork",
    "make_extent_table",
    "make_extents",
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
