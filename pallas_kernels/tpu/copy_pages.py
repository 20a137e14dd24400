"""Copies pages to other pages of the same pool on TPU: for copy-on-write, beams, defragmentation."""

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.bytes_arguments import check_page_list
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.dtypes import check_dtype
from pallas_kernels.tpu.page_copies import copy_each, in_range
from pallas_kernels.tpu.page_stream import Ref


def copy_pages(
    pool: Shaped[Array, "total_pages *page"],
    source: Int32[Array, " copies"],
    target: Int32[Array, " copies"],
    *,
    num_pages: int,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "total_pages *page"]:
    """Copies pages, in all layers, from `source` to `target`; a number out of range in either means no copy.

    In place if `pool` is donated. No page is both a source and a target, and no target stands twice. Any dtype but
    float16, and any array of pages: side tensors too. Cost: the copies there are, HBM to HBM; one launch.

    Raises ValueError for shapes that the kernel does not take, NotImplementedError for float16.
    """
    check_dtype(pool)
    check_page_list(pool, source, num_pages)
    check_page_list(pool, target, num_pages)
    if source.shape != target.shape:
        raise ValueError(f"{source.shape=}, {target.shape=}; give each source its target")

    def plan(source: Ref, target: Ref, before: Ref, pool: Ref):
        return (
            lambda item: in_range(source[item], num_pages) & in_range(target[item], num_pages),
            lambda item, layer: (pool.at[layer * num_pages + source[item]], pool.at[layer * num_pages + target[item]]),
        )

    return copy_each(
        [source, target],
        [pool],
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        plan,
        layers=pool.shape[0] // num_pages,
        aliased=0,
        facts=facts,
        interpret=interpret,
        name="copy_pages",
    )
