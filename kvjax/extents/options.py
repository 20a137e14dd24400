"""What a cache on extents is told beside the sizes of its pages."""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.extents.table import ExtentShape
from kvjax.inputs import static_size
from kvjax.pages import GroupShape

LONGEST_SPAN = 32
LEAST_RUNS = 128
"""A row of lanes on a TPU, whose kernels read the lists of runs by whole ones."""


@dataclass(frozen=True, slots=True)
class ExtentOptions:
    """How pages are kept side by side; pass it to `kvjax.init` as `extents`.

    Attributes:
      span: pages handed to a row at a time to grow in.  None: as many as leave each row four places to grow in, from 1
        to 32.
      max_runs: the most runs of adjacent pages a row may have; one that would need more is refused as FRAGMENTED.
        None: twice the spans of a row of the greatest length, at least 128; so rows of at most 128 pages are never
        refused.  In either case no more than the pages a row may map, and on TPU rounded up to whole lanes, 128.
    """

    span: int | None = None
    max_runs: int | None = None

    def __post_init__(self) -> None:
        for name in ("span", "max_runs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, static_size(name, getattr(self, name)))

    def shape(self, group: GroupShape, *, rows: int, lane_multiple: int = 1) -> ExtentShape:
        """The sizes of one group; ValueError for a span larger than its pool."""
        span = min(LONGEST_SPAN, max(1, group.num_pages // (4 * rows))) if self.span is None else self.span
        runs = max(LEAST_RUNS, 2 * -(-group.width // span)) if self.max_runs is None else self.max_runs
        runs = -(-min(runs, group.width) // lane_multiple) * lane_multiple
        return ExtentShape(group.num_pages, group.page_size, group.width, max_runs=runs, span=span)
