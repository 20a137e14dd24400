"""What a virtual space asks of a platform: addresses, page-groups of memory, and mapping one onto the other."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Int32, Shaped

from kvjax.attention.paged import Backend
from kvjax.virtual.span import SpanLayout


@runtime_checkable
class Store(Protocol):
    """A function that stores through a mapping; two that are equal are one to the compiler."""

    def __call__(
        self,
        handle: Int32[Array, ""],
        order: Int32[Array, ""],
        row: Int32[Array, " packed"],
        position: Int32[Array, " packed"],
        generation: Int32[Array, " packed"],
        start: Int32[Array, ""],
        values: Shaped[Array, "packed elements"],
    ) -> Int32[Array, ""]:
        """Stores values: elements `start` on of each token's record, as part of a traced program.

        Tokens whose row is out of range are dropped, and on the host those whose generation is not the row's present
        one or whose place has no page.  Returns 0, once these stores are done and those that `order` stands for: a
        value the compiler does not know, to be added to the addresses that read.
        """
        ...


@runtime_checkable
class AddressRange(Protocol):
    """A reserved range of addresses, `places` page-groups long, and `num_pages` page-groups of memory to map there.

    A *place* is a page-group of addresses, a *page* one of memory.  What the platform refuses is answered with False
    and leaves the mapping as it was.  Calls come from one thread at a time.

    Attributes:
      address: where the range begins.
      mapped: the page at each place; `num_pages` where there is none.
      generation: of each row's request; the space counts it on when a request ends.
      store: stores through the mapping, as part of a traced program; see `Store`.
      handle: the number by which `store` knows the range at run time.
    """

    address: int
    mapped: Int32[np.ndarray, " places"]
    generation: Int32[np.ndarray, " rows"]
    store: Store
    handle: int

    def map(self, place: int, page: int, count: int) -> bool:
        """Maps pages [page, page + count) at places [place, place + count), in place of what is mapped there.

        Memory is committed before it is mapped, so that touching it cannot fail later.
        """
        ...

    def unmap(self, place: int, count: int) -> bool:
        """Takes whatever is mapped from places [place, place + count)."""
        ...

    def copy(self, source: int, target: int) -> bool:
        """Copies one page's bytes; commits the target's memory first."""
        ...

    def array(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        """The range from its beginning as a jax array at `address`, without a copy.  Never donate it."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of memory committed, by the platform's own account."""
        ...

    def close(self) -> None:
        """Gives the memory back.  Arrays made of the range must not be used any more."""
        ...


@runtime_checkable
class Substrate(Protocol):
    """A platform.

    Attributes:
      granularity: bytes it maps at a time.
      backend: what attends to its memory.
      reads_at_once: tokens that attention reads together and that must all be memory; 1 where reading a place without
        a page is harmless.
    """

    @property
    def granularity(self) -> int: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def reads_at_once(self) -> int: ...

    def reserve(self, layout: SpanLayout, num_pages: int) -> AddressRange:
        """Addresses for every row of a `SpanLayout`, and the right to `num_pages` of its page-groups of memory."""
        ...
