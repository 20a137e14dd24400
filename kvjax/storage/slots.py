"""Slots of many positions at once: the jitted form of `kvjax.layout.physical_slot`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.inputs import INT32_MAX, integers, static_size


def physical_slots(
    pages: Int32[Array, " mapped"], page_size: int, positions: Int32[Array, " positions"], *, num_pages: int
) -> Int32[Array, " positions"]:
    """The slot of each position of one row; num_pages · page_size (out of range) where it has none.  Traceable.

    Args:
      pages: the row's physical pages, in order; `num_pages` where nothing is mapped.
      page_size: token positions a page.
      positions: positions in the row.
      num_pages: pages of the pool.

    Raises:
      ValueError: a size below 1, slots that do not fit 32 bits, or arrays that are not one-dimensional integers.
    """
    page_size, num_pages = static_size("page_size", page_size), static_size("num_pages", num_pages)
    if page_size * num_pages > INT32_MAX:
        raise ValueError(f"{num_pages=} × {page_size=} exceeds {INT32_MAX}: slots are 32 bits")
    pages = integers("pages", pages, (None,), "the page ids of one row")
    positions = integers("positions", positions, (None,), "positions in the row")
    logical = jnp.where(positions < 0, pages.shape[0], positions // page_size)
    page = pages.at[logical].get(mode="fill", fill_value=num_pages)
    mapped = (page >= 0) & (page < num_pages)
    return jnp.where(mapped, page * page_size + positions % page_size, num_pages * page_size)
