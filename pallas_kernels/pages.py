"""What is done to whole pages, in all layers, in one launch: copy, gather and write back, scrub.

Each op is a list of copies of pages, made by the kernel `move_pages` of the backend whose facts are given.
`bytes_reference` holds the same ops in plain jax.numpy, which are their contract.  Pages of any array will do whose
first axis runs over layers and pages: side tensors too.  float16 is refused on TPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.bytes_arguments import check_images, check_page_list
from pallas_kernels.hardware import GpuFacts, TpuFacts


def copy_pages(
    pool: Shaped[Array, "total_pages *page"],
    source: Int32[Array, " copies"],
    target: Int32[Array, " copies"],
    *,
    num_pages: int,
    facts: TpuFacts | GpuFacts,
    interpret: Any = None,
) -> Shaped[Array, "total_pages *page"]:
    """Copies pages, in all layers, from `source` to `target`; a number out of range in either means no copy.

    In place if `pool` is donated. No page is both a source and a target, and no target stands twice. For copy-on-write,
    beams, defragmentation. Cost: the copies there are, each read and written once.
    """
    check_page_list(pool, source, num_pages)
    check_page_list(pool, target, num_pages)
    if source.shape != target.shape:
        raise ValueError(f"{source.shape=}, {target.shape=}; give each source its target")
    return _move(None, pool, source, target, num_pages, num_pages, facts, interpret)


def gather_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    *,
    num_pages: int,
    facts: TpuFacts | GpuFacts,
    interpret: Any = None,
) -> Shaped[Array, "layers pages *page"]:
    """The bytes of pages, in all layers; zeros for a number out of range.

    For swapping, snapshots and transfers. Cost: each page asked for is read and written once, by one launch; the zeros
    are written by a second.
    """
    check_page_list(pool, pages, num_pages)
    layers, asked = pool.shape[0] // num_pages, pages.shape[0]
    shape = jax.ShapeDtypeStruct((layers * asked, *pool.shape[1:]), pool.dtype)
    places = jnp.arange(asked, dtype=jnp.int32)
    written = _move(pool, shape, pages, places, num_pages, asked, facts, interpret)
    # The images are a pool themselves, of which the places of no page are not written yet.
    missing = jnp.where((pages >= 0) & (pages < num_pages), asked, places)
    images = scrub_pages(written, missing, num_pages=asked, facts=facts, interpret=interpret)
    return images.reshape(layers, asked, *pool.shape[1:])


def write_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    images: Shaped[Array, "layers pages *page"],
    *,
    num_pages: int,
    facts: TpuFacts | GpuFacts,
    interpret: Any = None,
) -> Shaped[Array, "total_pages *page"]:
    """Puts bytes that `gather_pages` gave into pages, in all layers; a number out of range takes none.

    In place if `pool` is donated. No page stands twice. Cost: each page is read and written once.
    """
    check_page_list(pool, pages, num_pages)
    check_images(pool, pages, images, num_pages)
    layers, given = images.shape[:2]
    flat = images.reshape(layers * given, *pool.shape[1:])
    return _move(flat, pool, jnp.arange(given, dtype=jnp.int32), pages, given, num_pages, facts, interpret)


def scrub_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    *,
    num_pages: int,
    facts: TpuFacts | GpuFacts,
    interpret: Any = None,
) -> Shaped[Array, "total_pages *page"]:
    """Makes every byte of these pages zero, in all layers; a number out of range means none.

    In place if `pool` is donated. No page stands twice. For pages that go to another tenant. Cost: each page is written
    once, from one page of zeros for all.
    """
    check_page_list(pool, pages, num_pages)
    zeros = jnp.zeros((1, *pool.shape[1:]), pool.dtype)
    return _move(zeros, pool, jnp.zeros_like(pages), pages, 1, num_pages, facts, interpret)


def _move(
    source: Array | None,
    target: Any,
    from_page: Array,
    to_page: Array,
    source_pages: int,
    target_pages: int,
    facts: TpuFacts | GpuFacts,
    interpret: Any,
) -> Array:
    # Imported when used: a backend's Pallas dialect is of no concern to the others.
    if isinstance(facts, TpuFacts):
        from pallas_kernels.tpu.move_pages import move_pages

        return move_pages(source, target, from_page, to_page, source_pages, target_pages, facts, interpret or False)
    from pallas_kernels.gpu.move_pages import move_pages as move_pages_on_gpu

    return move_pages_on_gpu(source, target, from_page, to_page, source_pages, target_pages, facts, interpret)
