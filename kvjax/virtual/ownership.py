"""Who owns a page-group: a `kvjax.pages.PageTable` on a CPU device, driven from the host.

Same table, same transitions, same invariants as paging; its pages are page-groups.  The table is an immutable value, so
that what was tried and refused later is undone by putting the old one back; for that, and because transitions take a
fraction of a millisecond on a thread that decode does not wait for, nothing is donated here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32

from kvjax import pages
from kvjax.inputs import INT32_MAX
from kvjax.pages import GroupShape, PageTable, Status, make_page_table

MAX_EPOCHS = 16
"""Steps that may be in flight, less one; a power of two."""


class Ownership:
    """The page table of a virtual space.

    Attributes:
      table: the table; replaced by each call that succeeds.
    """

    table: PageTable

    def __init__(self, *, rows: int, num_pages: int, page_tokens: int, width: int):
        self._device = jax.local_devices(backend="cpu")[0]
        with jax.default_device(self._device):
            shape = GroupShape(num_pages, page_tokens, width)
            self.table = make_page_table([shape], rows=rows, max_epochs=MAX_EPOCHS)
        self.rows, self.num_pages, self.page_tokens, self.width = rows, num_pages, page_tokens, width

    @property
    def free(self) -> int:
        """Page-groups that can be taken now."""
        return int(self.table.groups[0].free)

    @property
    def limbo(self) -> int:
        """Page-groups without a holder that a step in flight may still touch."""
        return int(self.table.groups[0].limbo)

    @property
    def refcount(self) -> Int32[np.ndarray, " num_pages"]:
        """Holders of each page-group."""
        return np.asarray(self.table.groups[0].refcount)

    @property
    def end(self) -> Int32[np.ndarray, " rows"]:
        """Page-groups each row holds."""
        return np.asarray(self.table.groups[0].end)

    @property
    def length(self) -> Int32[np.ndarray, " rows"]:
        """Committed tokens each row has in the table."""
        return np.asarray(self.table.length)

    @property
    def reserved(self) -> Int32[np.ndarray, " rows"]:
        """End of the positions each row may write."""
        return np.asarray(self.table.reserved)

    @property
    def pages(self) -> Int32[np.ndarray, "rows width"]:
        """The table itself; columns past a row's `end` mean nothing."""
        return np.asarray(self.table.groups[0].pages)

    def pages_of(self, row: int) -> Int32[np.ndarray, " end"]:
        """The page-groups a row holds, in order."""
        return self.pages[row, : self.end[row]]

    def reserve(
        self, tokens: Int[np.ndarray, " rows"], order: Int[np.ndarray, " rows"] | None = None
    ) -> tuple[Int32[np.ndarray, " rows"], list[tuple[int, int, int]]]:
        """`pages.reserve`; status codes, and the copies to make first as (row, source page, target page)."""
        order = np.asarray(np.arange(self.rows) if order is None else order, np.int32)
        bound = self._bucket(int(tokens.sum()))
        info = self._call(pages.reserve, np.asarray(tokens, np.int32), order=order, max_tokens=bound)
        source, target = (np.asarray(side) for side in (info.copies[0].source, info.copies[0].target))
        copies = [(int(row), int(source[row]), int(target[row])) for row in np.flatnonzero(source < self.num_pages)]
        return np.asarray(info.status), copies

    def commit(self, length: Int[np.ndarray, " rows"]) -> None:
        """Lengthens rows to `length` tokens."""
        info = self._call(pages.commit, np.asarray(length - self.length, np.int32))
        pages.raise_for_status(info.status, operation="commit")

    def truncate(self, row: int, length: int) -> None:
        """Rewinds a row and drops the page-groups beyond."""
        bound = self._bucket(self.width)
        info = self._call(pages.truncate, self._at(row, length), max_pages=bound, rows=self._only(row))
        pages.raise_for_status(info.status, operation="truncate")

    def rewind(self, row: int, length: int) -> None:
        """Rewinds a row and keeps its page-groups, to be written again."""
        bound = self._bucket(self.width)
        info = self._call(pages.rewind, self._at(row, length), max_pages=bound, rows=self._only(row))
        pages.raise_for_status(info.status, operation="rewind")

    def release(self, row: int) -> None:
        """Empties a row."""
        info = self._call(pages.release, self._only(row), max_pages=self._bucket(self.width))
        pages.raise_for_status(info.status, operation="release")

    def adopt(self, row: int, ids: Int[np.ndarray, " ids"], tokens: int) -> Status:
        """An empty row takes page-groups that somebody holds."""
        wanted = np.full((self.rows, self._bucket(len(ids))), self.num_pages, np.int32)
        wanted[row, : len(ids)] = ids
        info = self._call(pages.adopt, [wanted], self._at(row, tokens), max_pages=self._bucket(self.width))
        return Status(int(info.status[row]))

    def pin(self, ids: Int[np.ndarray, " ids"]) -> None:
        """Holds page-groups without a row."""
        (status,) = self._call(pages.pin, [self._padded(ids)]).status
        pages.raise_for_status(status, operation="pin")

    def unpin(self, ids: Int[np.ndarray, " ids"]) -> None:
        """Lets go of page-groups that `pin` held."""
        (status,) = self._call(pages.unpin, [self._padded(ids)]).status
        pages.raise_for_status(status, operation="unpin")

    def advance(self, completed: int) -> None:
        """Closes the open epoch; page-groups dropped up to the end of `completed` become free."""
        pages.raise_for_status(self._call(pages.advance, np.int32(completed)).status, operation="advance")

    @property
    def epoch(self) -> int:
        """The open epoch."""
        return int(self.table.epoch)

    @property
    def completed(self) -> int:
        """The last epoch known to be complete."""
        return int(self.table.completed)

    def _call(self, transition: Callable, *arguments: Any, **static: Any) -> Any:
        names = tuple(name for name in static if name.startswith("max_"))
        with jax.default_device(self._device):
            self.table, info = _jitted(transition, names)(self.table, *arguments, **static)
        return info

    def _bucket(self, count: int) -> int:
        """A static bound of at least `count`: a power of four, so that few programs are compiled."""
        bound = 64
        while bound < count:
            bound *= 4
        return max(count, min(bound, INT32_MAX // self.rows))

    def _padded(self, ids: Int[np.ndarray, " ids"]) -> Int32[np.ndarray, " bucket"]:
        padded = np.full(self._bucket(len(ids)), self.num_pages, np.int32)
        padded[: len(ids)] = ids
        return padded

    def _at(self, row: int, value: int) -> Int32[np.ndarray, " rows"]:
        values = np.zeros(self.rows, np.int32)
        values[row] = value
        return values

    def _only(self, row: int) -> Bool[np.ndarray, " rows"]:
        return np.arange(self.rows) == row


@cache
def _jitted(transition: Callable, static: tuple[str, ...]) -> Callable:
    return jax.jit(transition, static_argnames=static)
