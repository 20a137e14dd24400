"""Zeroes pages of a pool on TPU, before they go to another tenant."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.bytes_arguments import check_page_list
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.dtypes import check_dtype
from pallas_kernels.tpu.page_copies import copy_each, in_range
from pallas_kernels.tpu.page_stream import Ref


def scrub_pages(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    *,
    num_pages: int,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "total_pages *page"]:
    """Makes every byte of these pages zero, in all layers; a number out of range means none.

    In place if `pool` is donated. No page stands twice. Any dtype but float16. Cost: each page is written once, from
    one page of zeros that is read as often; one launch.

    Raises ValueError for shapes that the kernel does not take, NotImplementedError for float16.
    """
    check_dtype(pool)
    check_page_list(pool, pages, num_pages)

    def plan(pages: Ref, zeros: Ref, before: Ref, pool: Ref):
        return (
            lambda item: in_range(pages[item], num_pages),
            lambda item, layer: (zeros.at[0], pool.at[layer * num_pages + pages[item]]),
        )

    return copy_each(
        [pages],
        [jnp.zeros((1, *pool.shape[1:]), pool.dtype), pool],
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        plan,
        layers=pool.shape[0] // num_pages,
        aliased=1,
        facts=facts,
        interpret=interpret,
        name="scrub_pages",
    )
