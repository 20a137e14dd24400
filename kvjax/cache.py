"""The cache: page tables and pools of all groups, and the calls that model code makes."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from jaxtyping import Array, Bool, Float, Int32

from kvjax.grant import Grant


@singledispatch
def reserve(
    cache: Any, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[Any, Grant]:
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def write(cache: Any, layer: int | Array, grant: Grant, **tensors: Array) -> Any:
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def attend(
    cache: Any,
    layer: int | Array,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    *,
    scale: float | None = None,
) -> Float[Array, "packed q_heads value_dim"]:
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def commit(cache: Any, tokens: Int32[Array, " rows"]) -> Any:
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def release(
    cache: Any, rows: Bool[Array, " rows"], *, max_pages: int | None = None
) -> tuple[Any, Int32[Array, " rows"]]:
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")
