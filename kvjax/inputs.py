"""What callers hand in, checked and brought to the dtypes of the state.

A wrong shape would broadcast or be cut, and a wrong dtype would overflow or change the state's; both are refused by
name, or cast where that loses nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

INT32_MAX = 2**31 - 1


def row_integers(name: str, values: Any, rows: int) -> Int32[Array, " rows"]:
    """One integer a row, as int32; wider integers are clipped to its range.

    Raises:
      ValueError: another shape than (rows,), or a dtype that is no integer.
    """
    return integers(name, values, (rows,), f"one integer for each of {rows} rows")


def integers(name: str, values: Any, shape: tuple[int | None, ...], meaning: str) -> Int32[Array, "*shape"]:
    """Integers of a shape (None is any size) as int32; ValueError says the `meaning` of what is asked for."""
    values = jnp.asarray(values)
    fits = len(values.shape) == len(shape) and all(
        want in (None, got) for want, got in zip(shape, values.shape, strict=True)
    )
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} has shape {values.shape} and dtype {values.dtype}; pass {meaning}")
    if values.dtype != jnp.int32:
        if jnp.iinfo(values.dtype).max > INT32_MAX:
            values = jnp.clip(values, max(-INT32_MAX - 1, jnp.iinfo(values.dtype).min), INT32_MAX)
        values = values.astype(jnp.int32)
    return values


def row_mask(name: str, values: Any, rows: int) -> Bool[Array, " rows"]:
    """One truth value a row; ValueError for another shape or dtype (row ids are not a mask)."""
    values = jnp.asarray(values)
    if values.shape != (rows,) or values.dtype != jnp.bool_:
        raise ValueError(
            f"{name} has shape {values.shape} and dtype {values.dtype}; pass a mask, one bool for each of {rows} rows"
        )
    return values


def static_size(name: str, value: Any, least: int = 1) -> int:
    """A size known at trace time, as a Python int; numpy's integers pass.

    Raises:
      ValueError: not an integer of at least `least`, or a traced value.
    """
    try:
        size = operator.index(value)
    except Exception as error:
        raise ValueError(f"{name}={value!r} must be an integer that is known when the call is traced") from error
    if isinstance(value, bool | np.bool_) or size < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
    return size
