"""The caches an engine can stand on, and the little in which they differ; `virtual` has a third.

A contiguous cache is seen as a paged one whose page is as long as a whole context: a row takes one page, all at once.
So admission, preemption and fragmentation are one arithmetic for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int32

import kvjax
from kvjax.contiguous import ContiguousCache
from kvjax.spec import CacheSpec


@runtime_checkable
class Backing(Protocol):
    """How an engine makes a cache, and what it needs to know of its pages.

    Attributes:
      num_pages, page_size: of the pool.
      max_context: positions a row may hold.
      shares_pages: rows can share a prefix.
      has_page_table: the cache is a `kvjax.KVCache`, whose pages can be mirrored, drawn and swapped.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def shares_pages(self) -> bool: ...

    @property
    def has_page_table(self) -> bool: ...

    def init(self, spec: CacheSpec, rows: int) -> Any:
        """An empty cache."""
        ...

    def advance(self, cache: Any) -> Any:
        """The cache with the pages freed so far fit for reuse: all work enqueued before is complete.  Traceable."""
        ...

    def free(self, cache: Any) -> Int32[Array, ""]:
        """Pages that can be taken now.  Traceable."""
        ...

    def faults(self, cache: Any) -> Int32[Array, ""]:
        """Sticky `kvjax.Fault` bits; 0 in a sound cache.  Traceable."""
        ...


@dataclass(frozen=True, slots=True)
class PagedBacking:
    """A `kvjax.KVCache` whose rows may each grow to `max_context` tokens, out of one pool of pages.

    A model with several groups gets a pool of this size for each.
    """

    num_pages: int
    page_size: int
    max_context: int
    shares_pages: bool = True
    has_page_table: bool = True

    def init(self, spec: CacheSpec, rows: int) -> Any:
        return kvjax.init(
            spec, rows=rows, num_pages=self.num_pages, page_size=self.page_size, max_context=self.max_context
        )

    def advance(self, cache: Any) -> Any:
        return kvjax.advance(cache)

    def free(self, cache: Any) -> Int32[Array, ""]:
        return jnp.min(jnp.stack([group.free for group in cache.table.groups]))

    def faults(self, cache: Any) -> Int32[Array, ""]:
        return cache.table.faults


@dataclass(frozen=True, slots=True)
class ContiguousBacking:
    """A `kvjax.ContiguousCache` of `rows` spans, one for each request that may run; nobody is ever refused."""

    rows: int
    max_context: int
    shares_pages: bool = False
    has_page_table: bool = False

    @property
    def num_pages(self) -> int:
        return self.rows

    @property
    def page_size(self) -> int:
        return self.max_context

    def init(self, spec: CacheSpec, rows: int) -> ContiguousCache:
        if rows != self.rows:
            raise ValueError(f"ContiguousBacking(rows={self.rows}) must have as many rows as the engine, {rows}")
        return kvjax.init_contiguous(spec, rows=rows, max_context=self.max_context)

    def advance(self, cache: ContiguousCache) -> ContiguousCache:
        return cache

    def free(self, cache: ContiguousCache) -> Int32[Array, ""]:
        return jnp.sum(cache.reserved == 0, dtype=jnp.int32)

    def faults(self, cache: ContiguousCache) -> Int32[Array, ""]:
        return jnp.int32(0)
