"""Ragged work lists of a static size: the alternative to a loop over rows, or to a dense pass over a whole table."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32


def pack_rows(counts: Int32[Array, " rows"], bound: int) -> tuple[Int32[Array, " bound"], Int32[Array, " bound"]]:
    """Lists every (row, index) with index < counts[row], row by row, in `bound` places.

    Padding has row == rows, and index 0.  The counts must not be negative and must sum to at most `bound`.
    O(rows + bound), no loop: each row is put where its list begins, and a running maximum carries it to its end.
    """
    rows = counts.shape[0]
    ends = jnp.cumsum(counts)
    starts = ends - counts
    place = jnp.arange(bound, dtype=jnp.int32)
    # Rows that list nothing would begin where another does; they are dropped, so that no place is set twice.
    begins = jnp.where(counts > 0, starts, bound)
    row = jnp.zeros(bound, jnp.int32).at[begins].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    row = jnp.where(place < ends[-1], lax.cummax(row), rows)
    return row, jnp.where(row < rows, place - starts.at[row].get(mode="clip"), 0)
