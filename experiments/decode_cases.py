"""What the decode sweep reads: batches of contexts, and caches full of numbers that are made where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

UNUSED_PAGE = 2**30
"""What stands in entries of a page table that nobody may read: far beyond any pool."""


@dataclass(frozen=True)
class Heads:
    """How many query and KV heads, and how wide both keys and values are."""

    q: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.q}:{self.kv}×{self.dim}"


@dataclass(frozen=True)
class Batch:
    """The contexts that one decode step reads, one query token each."""

    name: str
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def needed_bytes(self, heads: Heads, itemsize: int = 2) -> int:
        """Keys and values of all positions, each read once."""
        return sum(self.lengths) * heads.kv * 2 * heads.dim * itemsize


def staggered(name: str, rows: int, length: int) -> Batch:
    """Rows of about one length: the first is exact, the others end up to six positions earlier, inside a page."""
    return Batch(name, tuple(length - row % 7 for row in range(rows)))


def one_long_row(rows: int, long: int, short: int) -> tuple[Batch, Batch]:
    """One long row among short ones, and a balanced batch of as many rows and positions."""
    each, rest = divmod(long + (rows - 1) * short, rows)
    lengths = [short] * rows
    lengths[rows // 2] = long
    return (
        Batch(
            f"1 × {long:,} + {rows - 1} × {short:,}",
            tuple(lengths),
        ),
        Batch(f"{rows} × {each:,} (balanced)", tuple(each + (row < rest) for row in range(rows))),
    )


@partial(jax.jit, static_argnums=(0, 1), static_argnames="dtype")
def made_up(shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> Float[Array, ...]:
    """Numbers of mean 0 and variance 1, uniform, each a hash of its place: nothing but the array itself is stored."""
    place = jnp.full(shape, seed, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) + jnp.uint32(size)
        place = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA77)
    place ^= place >> 13
    unit = (place >> 8).astype(jnp.float32) / 2**24
    return ((2 * unit - 1) * 3**0.5).astype(dtype)


@dataclass(frozen=True)
class Paging:
    """Where the positions of a batch lie: pages in random order."""

    table: Int32[np.ndarray, "rows width"]  # UNUSED_PAGE past a row's pages
    page_size: int
    num_pages: int

    def of(self, row: int, length: int) -> Int32[np.ndarray, " pages"]:
        """The pages of a row's first `length` positions."""
        return self.table[row, : -(-length // self.page_size)]

    def past_the_ends(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """(page, slot) of every mapped position at or past its row's length."""
        ends = [
            (self.of(row, length)[-1], slot)
            for row, length in enumerate(batch.lengths)
            for slot in range(length % self.page_size or self.page_size, self.page_size)
        ]
        pages, slots = zip(*ends, strict=True) if ends else ((), ())
        return np.array(pages, np.int32), np.array(slots, np.int32)


def permuted(batch: Batch, page_size: int, seed: int = 0) -> Paging:
    """A page table whose physical pages are shuffled; its width is a multiple of 16 pages."""
    counts = [-(-length // page_size) for length in batch.lengths]
    width = -(-max(counts) // 16) * 16
    order = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
    table = np.full((batch.rows, width), UNUSED_PAGE, np.int32)
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = order[end - count : end]
    return Paging(table, page_size, sum(counts))
