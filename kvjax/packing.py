"""Ragged work lists of a static size: the alternative to a loop over rows, or to a dense pass over a whole table."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32


def pack_rows(counts: Int32[Array, " rows"], bound: int) -> tuple[Int32[Array, " bound"], Int32[Array, " bound"]]:
    """Lists every (row, index) with index < counts[row], row by row, in `bound` places.

    Padding has row == rows, and index 0.  The counts must not be negative and must sum to at most `bound`.
    O(rows + bound · log rows), no loop.
    """
    rows = counts.shape[0]
    ends = jnp.cumsum(counts)
    place = jnp.arange(bound, dtype=jnp.int32)
    row = jnp.searchsorted(ends, place, side="right", method="scan_unrolled").astype(jnp.int32)
    start = (ends - counts).at[row].get(mode="clip")
    return row, jnp.where(row < rows, place - start, 0)
