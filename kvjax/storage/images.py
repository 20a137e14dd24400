"""Whole pages out of a pool and back into it: what swapping to the host, a snapshot or a transfer moves."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from kvjax.storage.pools import Pool

Images = Shaped[Array, "layers pages heads page_size lanes"]
"""Pages of one pool in all its layers, in the order they were asked for."""


def read_pages(pool: Pool, num_pages: int, pages: Int32[Array, " pages"]) -> Images:
    """The bytes of whole pages, in all layers; zeros for `num_pages`, which means none.

    Reads and writes just those pages, and no other page's bytes are in the result.
    """
    return pool.at[_places(pool, num_pages, pages)].get(mode="fill", fill_value=0)


def write_pages(pool: Pool, num_pages: int, pages: Int32[Array, " pages"], images: Images) -> Pool:
    """Puts bytes that `read_pages` gave into pages, in all layers; `num_pages` means none.

    No page stands twice.  In place when the pool is donated.
    """
    return pool.at[_places(pool, num_pages, pages)].set(images, mode="drop")


def _places(pool: Pool, num_pages: int, pages: Int32[Array, " pages"]) -> Int32[Array, "layers pages"]:
    """Where each page stands in each layer; out of range for none."""
    size = pool.shape[0]
    first = jnp.arange(size // num_pages, dtype=jnp.int32)[:, None] * num_pages
    return jnp.where(pages < num_pages, first + pages, size)
