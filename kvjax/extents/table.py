"""The state: a page table, and beside it what lets its pages lie side by side.

The page table stays the whole truth about ownership; every transition here is the page table's, with one thing decided
before it and some bookkeeping after.  What a `reserve` takes stands at the head of the ring of free pages, and the
order of the free part of the ring is nobody's concern: so `Extents` say which free pages to bring to the head.

Words: a *run* is a stretch of a row's logical pages that are physically adjacent too.  A *span* is `span` pages at an
aligned place; a span that is wholly free is handed to a row as a place to grow in, for nobody else looks there before
whole spans run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.inputs import static_size
from kvjax.pages import GroupShape, PageTable, make_page_table
from pallas_kernels.arguments import Runs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Extents:
    """One group's adjacency: the runs of its rows, and where its free pages and wholly free spans are.

    Attributes:
      runs: each row's pages as runs.
      place: where in the page table's ring each page without a holder stands; stale for the others.
      span_free: free pages in each span, those in limbo not counted.
      spans: a ring of the wholly free spans, in any order.
      span_place: where in `spans` each of them stands; stale for the others.
      span_head, span_tail: cursors of `spans`, in [0, 2 · num_spans).
      span: pages a span.  Pages past the last whole span belong to none.
    """

    runs: Runs
    place: Int32[Array, " num_pages"]
    span_free: Int32[Array, " num_spans"]
    spans: Int32[Array, " num_spans"]
    span_place: Int32[Array, " num_spans"]
    span_head: Int32[Array, ""]
    span_tail: Int32[Array, ""]
    span: int = field(metadata={"static": True})

    @property
    def num_spans(self) -> int:
        return self.spans.shape[0]

    @property
    def free_spans(self) -> Int32[Array, ""]:
        """Spans of which every page is free."""
        return (self.span_tail - self.span_head) % (2 * self.num_spans)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ExtentTable:
    """Ownership as in `table`, with an `Extents` beside each of its groups.

    The page tables of `table` and the runs of `extents` say the same: a kernel may read either.
    """

    table: PageTable
    extents: tuple[Extents, ...]


@dataclass(frozen=True, slots=True)
class ExtentShape:
    """The static sizes of one group.

    Attributes:
      num_pages: pages in the pool.
      page_size: token positions a page.
      width: the most pages a row may map.
      max_runs: the most runs a row may have; a row that would need more is refused as FRAGMENTED.
      span: pages handed to a row at a time to grow in.  A large span makes long runs, and rows that stay shorter than
        one leave the rest of it to the rows that come when no whole span is left.
    """

    num_pages: int
    page_size: int
    width: int
    max_runs: int
    span: int

    def __post_init__(self) -> None:
        for name in ("max_runs", "span"):
            object.__setattr__(self, name, static_size(name, getattr(self, name)))
        if self.span > self.num_pages:
            raise ValueError(f"span={self.span} exceeds num_pages={self.num_pages}: no span would ever be whole")


def make_extent_table(groups: Sequence[ExtentShape], *, rows: int, max_epochs: int = 16) -> ExtentTable:
    """A table in which every page is free, every span whole and every row empty.

    Args:
      groups: sizes of each group.
      rows: sequences that can be live at once.
      max_epochs: as in `kvjax.pages.make_page_table`.

    Raises:
      ValueError: a size below 1 or out of range; a span larger than the pool.
    """
    shapes = [GroupShape(shape.num_pages, shape.page_size, shape.width) for shape in groups]
    table = make_page_table(shapes, rows=rows, max_epochs=max_epochs)
    return ExtentTable(table, tuple(make_extents(shape, rows) for shape in groups))


def make_extents(shape: ExtentShape, rows: int) -> Extents:
    """The adjacency of one group in which every page is free."""
    num_spans = shape.num_pages // shape.span
    # Every leaf has a buffer of its own: one buffer in two donated leaves would be an error.
    return Extents(
        runs=Runs(
            starts=jnp.zeros((rows, shape.max_runs), jnp.int32),
            ends=jnp.zeros((rows, shape.max_runs), jnp.int32),
            num_runs=jnp.zeros(rows, jnp.int32),
        ),
        place=jnp.arange(shape.num_pages, dtype=jnp.int32),
        span_free=jnp.full(num_spans, shape.span, jnp.int32),
        spans=jnp.arange(num_spans, dtype=jnp.int32),
        span_place=jnp.arange(num_spans, dtype=jnp.int32),
        span_head=jnp.zeros((), jnp.int32),
        span_tail=jnp.full((), num_spans, jnp.int32),
        span=shape.span,
    )
