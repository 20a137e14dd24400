"""Extents: a page table whose rows are short lists of runs of adjacent pages, for kernels that copy a run at a time."""

from kvjax.virtual.extents.invariants import check_invariants, pages_of_runs
from kvjax.virtual.extents.table import Extents, ExtentShape, ExtentTable, Runs, make_extent_table
from kvjax.virtual.extents.transitions import (
    adopt,
    advance,
    commit,
    fork,
    pin,
    release,
    reorder,
    reserve,
    truncate,
    unpin,
)

__all__ = [
    "ExtentShape",
    "ExtentTable",
    "Extents",
    "Runs",
    "adopt",
    "advance",
    "check_invariants",
    "commit",
    "fork",
    "make_extent_table",
    "pages_of_runs",
    "pin",
    "release",
    "reorder",
    "reserve",
    "truncate",
    "unpin",
]
