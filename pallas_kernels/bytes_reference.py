"""What moves cached bytes, in plain jax.numpy: the contract that the kernels of the same names are held to, bit by bit.

A pool holds the pages of all layers, `[layers · num_pages, …]`: page p of layer l is its entry l · num_pages + p.
Each op leaves every bit that it does not name as it was, and runs in place where its first argument is donated.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.quantise import as_bits, stored_tokens


def append(
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: tuple[Float[Array, "packed kv_heads _"], ...],
    *,
    scales: tuple[Float32[Array, "*_"], ...] | None = None,
) -> tuple[Shaped[Array, "total_pages kv_heads page_size lanes"], tuple[Float32[Array, "*_"], ...] | None]:
    """Writes one token each into slot `offset` of page `page`, the layer's offset included.

    Args:
      pool: bfloat16, float16, float32, or quantised: float8_e4m3fn, float8_e5m2, int8.
      page: of each token; one out of range drops it. No slot is written twice.
      offset: the slot in its page; one out of range drops the token.
      tensors: what a slot holds side by side: the new keys, and the new values. Lanes beyond them become zero.
      scales: of a quantised pool, for each tensor: one number, or one a KV head `[kv_heads]`, or one a token and head,
        `[total_pages, scale_lanes]` with head h and slot t of a page at lane h · page_size + t; donate those. A token's
        own scale is made here, the largest magnitude of a head over that of the dtype, and stored in its place.

    Returns the pool and the scales. A tensor is cast to the pool's dtype; with scales it is divided by its own, rounded
    to nearest even and saturates, and a scale of 0 stores 0. Without, a quantised pool takes its own dtype alone.
    """
    total_pages, kv_heads, page_size, _ = pool.shape
    tokens, made = stored_tokens(tensors, scales, pool)
    page = jnp.where((page >= 0) & (offset >= 0), page, total_pages)  # or it would count from the end
    stored = as_bits(pool).at[page, :, offset].set(as_bits(tokens), mode="drop")
    pool = lax.bitcast_convert_type(stored, pool.dtype)
    if made is not None and scales is not None:
        page = jnp.where(offset < page_size, page, total_pages)
        lanes = jnp.arange(kv_heads) * page_size + offset[:, None]
        pairs = zip(scales, made, strict=True)
        scales = tuple(old.at[page[:, None], lanes].set(new, mode="drop") for old, new in pairs)
    return pool, scales


def copy_pages(
    pool: Shaped[Array, "total_pages *page"],
    source: Int32[Array, " copies"],
    target: Int32[Array, " copies"],
    *,
    num_pages: int,
) -> Shaped[Array, "total_pages *page"]:
    """Copies pages, in all layers, from `source` to `target`; a number out of range in either means no copy.

    No page is both a source and a target, and no target stands twice.
    """
    none = ~(_in_range(source, num_pages) & _in_range(target, num_pages))
    target = jnp.where(none, num_pages, target)
    return write_pages(pool, target, gather_pages(pool, source, num_pages=num_pages), num_pages=num_pages)


def gather_pages(
    pool: Shaped[Array, "total_pages *page"], pages: Int32[Array, " pages"], *, num_pages: int
) -> Shaped[Array, "layers pages *page"]:
    """The bytes of pages, in all layers; zeros for a number out of range."""
    images = as_bits(pool).at[_places(pool, pages, num_pages)].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(images, pool.dtype)


def write_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    images: Shaped[Array, "layers pages *page"],
    *,
    num_pages: int,
) -> Shaped[Array, "total_pages *page"]:
    """Puts bytes that `gather_pages` gave into pages, in all layers; a number out of range takes none.

    No page stands twice.
    """
    bits = as_bits(pool).at[_places(pool, pages, num_pages)].set(as_bits(images), mode="drop")
    return lax.bitcast_convert_type(bits, pool.dtype)


def scrub_pages(
    pool: Shaped[Array, "total_pages *page"], pages: Int32[Array, " pages"], *, num_pages: int
) -> Shaped[Array, "total_pages *page"]:
    """Makes every byte of these pages zero, in all layers; a number out of range means none."""
    bits = as_bits(pool).at[_places(pool, pages, num_pages)].set(0, mode="drop")
    return lax.bitcast_convert_type(bits, pool.dtype)


def _in_range(pages: Int32[Array, " pages"], num_pages: int) -> Shaped[Array, " pages"]:
    return (pages >= 0) & (pages < num_pages)


def _places(pool: Array, pages: Int32[Array, " pages"], num_pages: int) -> Int32[Array, "layers pages"]:
    """Where each page stands in each layer; out of range for none."""
    total_pages = pool.shape[0]
    first = jnp.arange(total_pages // num_pages, dtype=jnp.int32)[:, None] * num_pages
    return jnp.where(_in_range(pages, num_pages), first + pages, total_pages)
