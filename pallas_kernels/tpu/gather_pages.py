"""Whole pages out of a pool into a dense array, and back, on TPU: for swapping, snapshots and transfers."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.bytes_arguments import check_images, check_page_list
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.dtypes import check_dtype
from pallas_kernels.tpu.page_copies import copy_each, in_range
from pallas_kernels.tpu.page_stream import Ref
from pallas_kernels.tpu.scrub_pages import scrub_pages


def gather_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    *,
    num_pages: int,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "layers pages *page"]:
    """The bytes of pages, in all layers; zeros for a number out of range. Any dtype but float16.

    Cost: each page asked for is read and written once, HBM to HBM; a second launch writes the zeros there are.

    Raises ValueError for shapes that the kernel does not take, NotImplementedError for float16.
    """
    check_dtype(pool)
    check_page_list(pool, pages, num_pages)
    layers, asked = pool.shape[0] // num_pages, pages.shape[0]

    def plan(pages: Ref, pool: Ref, images: Ref):
        return (
            lambda item: in_range(pages[item], num_pages),
            lambda item, layer: (pool.at[layer * num_pages + pages[item]], images.at[layer * asked + item]),
        )

    images = copy_each(
        [pages],
        [pool],
        jax.ShapeDtypeStruct((layers * asked, *pool.shape[1:]), pool.dtype),
        plan,
        layers=layers,
        aliased=None,
        facts=facts,
        interpret=interpret,
        name="gather_pages",
    )
    # What was not asked for is not written: the images are a pool themselves, and those of no page are scrubbed.
    places = jnp.arange(asked, dtype=jnp.int32)
    missing = jnp.where(in_range(pages, num_pages), asked, places)
    images = scrub_pages(images, missing, num_pages=asked, facts=facts, interpret=interpret)
    return images.reshape(layers, asked, *pool.shape[1:])


def write_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    images: Shaped[Array, "layers pages *page"],
    *,
    num_pages: int,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "total_pages *page"]:
    """Puts bytes that `gather_pages` gave into pages, in all layers; a number out of range takes none.

    In place if `pool` is donated. No page stands twice. Cost and errors as of `gather_pages`.
    """
    check_dtype(pool)
    check_page_list(pool, pages, num_pages)
    check_images(pool, pages, images, num_pages)

    def plan(pages: Ref, images: Ref, before: Ref, pool: Ref):
        return (
            lambda item: in_range(pages[item], num_pages),
            lambda item, layer: (images.at[layer, item], pool.at[layer * num_pages + pages[item]]),
        )

    return copy_each(
        [pages],
        [images, pool],
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        plan,
        layers=pool.shape[0] // num_pages,
        aliased=1,
        facts=facts,
        interpret=interpret,
        name="write_pages",
    )
