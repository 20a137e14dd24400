"""Appends and page copies by the code that a cache's backend names: plain XLA, or the kernels of its chip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from jaxtyping import Array, Float32, Int32, Shaped

from kvjax.layout import PoolLayout
from kvjax.storage import pools
from kvjax.storage.pools import NO_SCALES, Pool
from pallas_kernels.hardware import GpuFacts, TpuFacts

Backend = Literal["xla"] | TpuFacts | GpuFacts


def append_tokens(
    pool: Pool,
    layout: PoolLayout,
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: Mapping[str, Shaped[Array, "packed _ _"]],
    scales: Mapping[str, Float32[Array, "*_"]] = NO_SCALES,
    backend: Backend = "xla",
) -> Pool:
    """As `pools.append_tokens`, with one demand more: tokens of a row stand together, in order of position."""
    if backend == "xla":
        return pools.append_tokens(pool, layout, page, offset, tensors, scales)
    # Imported when used: a backend's Pallas dialect is of no concern to the others.
    if isinstance(backend, TpuFacts):
        from pallas_kernels.tpu.append import append
    else:
        from pallas_kernels.gpu.append import append  # type: ignore[no-redef,assignment]
    new, new_scales = pools.side_by_side(layout, tensors, scales)
    if new_scales is None:
        new = tuple(tensor.astype(pool.dtype) for tensor in new)
    pool, _ = append(pool, page, offset, new, scales=new_scales, facts=backend)  # type: ignore[arg-type]
    return pool


def copy_pages(
    pool: Pool,
    num_pages: int,
    source: Int32[Array, " rows"],
    target: Int32[Array, " rows"],
    backend: Backend = "xla",
) -> Pool:
    """As `pools.copy_pages`: whole pages in all layers, from `source` to `target`; `num_pages` means none."""
    if backend == "xla":
        return pools.copy_pages(pool, num_pages, source, target)
    from pallas_kernels.pages import copy_pages as copy_by_kernel

    return copy_by_kernel(pool, source, target, num_pages=num_pages, facts=backend)
