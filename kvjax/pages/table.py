"""The state: who owns which page, for all groups at once.

`PageTable` is one frozen pytree and the whole truth about ownership.  The transitions beside this file take one and
return the next.  Words: a *page* is `page_size` token positions of a group; a *row* is one live sequence; a *holder*
of a page is a row that maps it or a pin; a page's refcount is the number of its holders.

Freed pages travel through one ring a group.  Three cursors cut it: free = [head, ready), in limbo = [ready, tail).
A page in limbo has no holder but may still be read or written by a step in flight; `advance` ends its limbo.  Cursors
run in [0, 2 · num_pages), twice round, so that full and empty differ and nothing overflows however long it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.inputs import INT32_MAX, static_size


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one group.

    Attributes:
      pages: physical page of logical page c of a row, in column c % width; `num_pages` where nothing is mapped.
      first, end: a row's mapped logical pages are [first, end).
      refcount: holders of each page.
      pins: those of its holders that are pins.
      ring: ids of the pages without a holder, in the order they were freed.
      head, ready, tail: cursors of the ring, in [0, 2 · num_pages).
      fences: where tail stood when each of the last `max_epochs` epochs closed.
      page_size: token positions a page.
    """

    pages: Int32[Array, "rows width"]
    first: Int32[Array, " rows"]
    end: Int32[Array, " rows"]
    refcount: Int32[Array, " num_pages"]
    pins: Int32[Array, " num_pages"]
    ring: Int32[Array, " num_pages"]
    head: Int32[Array, ""]
    ready: Int32[Array, ""]
    tail: Int32[Array, ""]
    fences: Int32[Array, " max_epochs"]
    page_size: int = field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Pages in the pool; also the id that means "no page"."""
        return self.refcount.shape[0]

    @property
    def width(self) -> int:
        """Columns of the table: the most pages a row may map."""
        return self.pages.shape[1]

    @property
    def free(self) -> Int32[Array, ""]:
        """Pages that can be taken now."""
        return (self.ready - self.head) % (2 * self.num_pages)

    @property
    def limbo(self) -> Int32[Array, ""]:
        """Pages without a holder that wait for `advance`."""
        return (self.tail - self.ready) % (2 * self.num_pages)

    @property
    def held(self) -> Int32[Array, ""]:
        """Pages with at least one holder."""
        return self.num_pages - self.free - self.limbo


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PageTable:
    """Ownership of every page of every group.

    Attributes:
      length: committed (computed) tokens a row.
      reserved: the end of the positions a row may write now.
      groups: one `GroupPages` a group.
      epoch: the open epoch.  Wraps around.
      completed: the last epoch known to be complete.
      faults: sticky `Fault` bits; zero in a sound table.

    Invariants: `first · page_size ≤ length ≤ reserved ≤ end · page_size` in every row and group; `check_invariants`.
    """

    length: Int32[Array, " rows"]
    reserved: Int32[Array, " rows"]
    groups: tuple[GroupPages, ...]
    epoch: Int32[Array, ""]
    completed: Int32[Array, ""]
    faults: Int32[Array, ""]

    @property
    def rows(self) -> int:
        return self.length.shape[0]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The static sizes of one group's pages.

    Attributes:
      num_pages: pages in the pool.
      page_size: token positions a page.
      width: the most pages a row may map.
    """

    num_pages: int
    page_size: int
    width: int

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "width"):
            object.__setattr__(self, name, static_size(name, getattr(self, name)))
        if self.num_pages > 2**29:
            raise ValueError(f"num_pages={self.num_pages} exceeds 2**29: ring cursors are 32 bits and run twice round")
        if self.width * self.page_size > INT32_MAX:
            raise ValueError(
                f"width={self.width} × page_size={self.page_size} exceeds {INT32_MAX}: positions are 32 bits; "
                "use a smaller page or a narrower table"
            )


def make_page_table(groups: Sequence[GroupShape], *, rows: int, max_epochs: int = 16) -> PageTable:
    """A table in which every page is free and every row empty.

    Args:
      groups: sizes of each group.
      rows: sequences that can be live at once.
      max_epochs: `advance` can complete the open epoch and the max_epochs − 1 before it: one more than the steps in
        flight, rounded up to a power of two, so that the epoch counter may wrap around.

    Raises:
      ValueError: a size below 1, or one whose positions or cursors would not fit 32 bits.
    """
    rows, max_epochs = static_size("rows", rows), static_size("max_epochs", max_epochs)
    if not groups:
        raise ValueError("a page table needs at least one group")
    if max_epochs & (max_epochs - 1):
        raise ValueError(f"{max_epochs=} must be a power of two")

    def one(shape: GroupShape) -> GroupPages:
        return GroupPages(
            pages=jnp.full((rows, shape.width), shape.num_pages, jnp.int32),
            first=jnp.zeros(rows, jnp.int32),
            end=jnp.zeros(rows, jnp.int32),
            refcount=jnp.zeros(shape.num_pages, jnp.int32),
            pins=jnp.zeros(shape.num_pages, jnp.int32),
            ring=jnp.arange(shape.num_pages, dtype=jnp.int32),
            head=jnp.zeros((), jnp.int32),
            ready=jnp.full((), shape.num_pages, jnp.int32),
            tail=jnp.full((), shape.num_pages, jnp.int32),
            fences=jnp.full(max_epochs, shape.num_pages, jnp.int32),
            page_size=shape.page_size,
        )

    # Every leaf has a buffer of its own: one buffer in two donated leaves would be an error.
    return PageTable(
        length=jnp.zeros(rows, jnp.int32),
        reserved=jnp.zeros(rows, jnp.int32),
        groups=tuple(one(shape) for shape in groups),
        epoch=jnp.zeros((), jnp.int32),
        completed=jnp.full((), -1, jnp.int32),
        faults=jnp.zeros((), jnp.int32),
    )


def pages_for(tokens: Int32[Array, "*shape"], page_size: int) -> Int32[Array, "*shape"]:
    """Pages that hold `tokens` tokens.  Written so that tokens + page_size − 1 cannot overflow."""
    return tokens // page_size + (tokens % page_size != 0)
