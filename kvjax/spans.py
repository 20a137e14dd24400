"""Rows that have a span of positions each: what `reserve`, `commit` and `truncate` do to their lengths.

A contiguous and a virtual cache have this in common: there is no page table, and no row takes memory from another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from kvjax.grant import Grant, make_grant
from kvjax.inputs import row_integers, row_mask, static_size
from kvjax.pages.status import Status


class Spans(Protocol):
    """A cache, which is a dataclass, with lengths of its own.

    Attributes:
      length: committed tokens a row.
      reserved: end of the positions a row may write now.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def length(self) -> Int32[Array, " rows"]: ...

    @property
    def reserved(self) -> Int32[Array, " rows"]: ...


def reserve[Cache: Spans](
    cache: Cache, tokens: Any, max_tokens: int, *, capacity: int, resident: Int32[Array, " rows"] | None = None
) -> tuple[Cache, Grant]:
    """Makes the next `tokens[row]` positions writable; all or nothing a row.

    Status: OK; TABLE_FULL past `capacity` positions; NOT_RESERVED past the `resident` ones, if given; OVER_BOUND for
    negative counts and past `max_tokens` together.
    """
    max_tokens = static_size("max_tokens", max_tokens)
    tokens = row_integers("tokens", tokens, cache.length.shape[0])
    full = tokens > capacity - cache.length
    absent = jnp.zeros_like(full) if resident is None else tokens > resident - cache.length
    malformed = (tokens < 0) | (tokens > max_tokens)
    counted = jnp.where(full | absent | malformed, 0, tokens)
    over = malformed | ((jnp.cumsum(counted) > max_tokens) & (tokens > 0))
    status = jnp.where(over, Status.OVER_BOUND, Status.OK)
    status = jnp.where(absent & ~malformed, Status.NOT_RESERVED, status)
    status = jnp.where(full, Status.TABLE_FULL, status).astype(jnp.int32)
    granted = jnp.where(status == Status.OK, tokens, 0)
    reserved = jnp.maximum(cache.reserved, cache.length + granted)
    return replace(cache, reserved=reserved), make_grant(granted, status, cache.length, max_tokens)


def commit[Cache: Spans](cache: Cache, tokens: Any) -> Cache:
    """Lengthens rows by `tokens[row]`; a row given more than it reserved is left as it was."""
    tokens = row_integers("tokens", tokens, cache.length.shape[0])
    valid = (tokens >= 0) & (tokens <= cache.reserved - cache.length)
    return replace(cache, length=cache.length + jnp.where(valid, tokens, 0))


def truncate[Cache: Spans](
    cache: Cache, length: Any, rows: Bool[Array, " rows"] | None
) -> tuple[Cache, Int32[Array, " rows"]]:
    """Rewinds rows to `length` committed tokens; NOT_RESERVED where that is negative or beyond the committed length."""
    number = cache.length.shape[0]
    chosen = jnp.ones(number, bool) if rows is None else row_mask("rows", rows, number)
    length = row_integers("length", length, number)
    valid = (length >= 0) & (length <= cache.length)
    acts = chosen & valid
    status = jnp.where(chosen & ~valid, Status.NOT_RESERVED, Status.OK).astype(jnp.int32)
    length, reserved = (jnp.where(acts, length, before) for before in (cache.length, cache.reserved))
    return replace(cache, length=length, reserved=reserved), status
