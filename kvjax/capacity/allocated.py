"""The bytes that `kvjax.init` allocates, from a spec and its sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.layout import canonical_layout
from kvjax.spec import CacheSpec

INT = 4
"""Bytes of every number of a page table."""


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """What a cache takes.

    Attributes:
      pools: keys and values, padding included.
      table: page tables, refcounts, pins and rings.
    """

    pools: int
    table: int

    @property
    def total(self) -> int:
        return self.pools + self.table


def cache_bytes(
    spec: CacheSpec,
    *,
    rows: int,
    num_pages: Sequence[int],
    page_size: Sequence[int],
    max_context: int,
    max_epochs: int = 16,
    lane_multiple: int = 1,
) -> CacheBytes:
    """Bytes of `kvjax.init` with the same arguments; `num_pages` and `page_size` for each group.

    `lane_multiple` is 128 on TPU, where a table's width is a multiple of it too.
    """
    pools = 0
    tables = []
    for group, number, size in zip(spec.groups, num_pages, page_size, strict=True):
        page = canonical_layout(group, size, lane_multiple=lane_multiple).bytes_per_page
        pools += len(group.layers) * number * page
        pages = -(-max_context // size)
        width = -(-pages // lane_multiple) * lane_multiple
        tables.append(table_bytes(rows=rows, width=width, num_pages=number, max_epochs=max_epochs))
    # Beside the groups: length and reserved of every row; epoch, completed and faults.
    return CacheBytes(pools, sum(tables) + INT * (2 * rows + 3))


def table_bytes(*, rows: int, width: int, num_pages: int, max_epochs: int = 16) -> int:
    """Bytes of one group's table: its entries, first and end of a row, three numbers a page, cursors and fences."""
    return INT * (rows * width + 2 * rows + 3 * num_pages + 3 + max_epochs)
