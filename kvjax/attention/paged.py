"""Attention over a paged cache: one op, three backends.

XLA runs anywhere; on TPU and GPU the Pallas kernels stream pages.  All take tiles of queries, so that decode, drafts,
chunked prefill and a mixture of them are the same call; all give the same result: the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32, Int32

from kvjax.attention import xla
from kvjax.attention.checks import check_if_asked
from kvjax.attention.tiles import make_tiling, tile_size
from kvjax.grant import Grant
from kvjax.layout import PoolLayout
from kvjax.storage import Pool
from pallas_kernels.arguments import QUANTISED_DTYPES, QUERY_DTYPES, Attention, Runs, Scales
from pallas_kernels.hardware import GPUS, TPUS, GpuFacts, TpuFacts

Backend = Literal["xla"] | TpuFacts | GpuFacts
"""Which code attends: plain XLA, or the kernels for the chip whose facts are given."""


def paged_attention(
    q: Float[Array, "packed q_heads key_dim"],
    grant: Grant,
    pool: Pool,
    layout: PoolLayout,
    pages: Int32[Array, "rows width"],
    page_offset: Int32[Array, ""] | int,
    *,
    runs: Runs | None = None,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None = None,
    scales: Scales | None = None,
    backend: Backend,
) -> Float[Array, "packed q_heads value_dim"]:
    """Causal attention of every granted token over its row's pages; zeros for padding tokens.

    Args:
      q: packed queries, one a granted token.
      grant: whose tokens they are.
      pool: the group's K/V pool.
      layout: where "k" and "v" stand in it.
      pages: the group's page table.
      page_offset: layer · num_pages, added to each page id.
      runs: the same pages as runs of adjacent ones, if the cache keeps them; the TPU kernel then copies whole runs, the
        other backends read the page table.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value.
      scales: what a quantised pool is multiplied by.
      backend: which code attends.
    """
    key_dim, _ = key_and_value_dims(layout)
    if q.shape[-1] != key_dim:
        raise ValueError(f"q has head dimension {q.shape[-1]}, the cache's keys have {key_dim}")
    if q.shape[1] % layout.heads:
        raise ValueError(f"q_heads={q.shape[1]} must be a multiple of kv_heads={layout.heads}, whose keys it shares")
    if pool.dtype.name not in (*QUERY_DTYPES, *QUANTISED_DTYPES):
        raise NotImplementedError(
            f"a cache of {pool.dtype} can be written, not attended; make it of a float or of int8"
        )
    quantised = pool.dtype.name in QUANTISED_DTYPES
    if quantised and scales is None:
        raise ValueError(f"a cache of {pool.dtype} is read with scales; pass kvjax.attention.Scales")
    if not quantised and scales is not None:
        raise ValueError(f"a cache of {pool.dtype} has no scales; leave them out")
    where = runs if runs is not None and isinstance(backend, TpuFacts) else pages
    size, attend = _choose(backend, grant, q.shape[1] // layout.heads, of_runs=where is runs)
    if backend != "xla" and not quantised:
        q = q.astype(pool.dtype)
    tiling = make_tiling(grant, size)
    page_offset = jnp.asarray(page_offset, jnp.int32)
    total_pages, _, page_size, _ = pool.shape
    check_if_asked(pages, tiling.tiles, page_offset, total_pages=total_pages, page_size=page_size, attention=attention)
    out = attend(
        tiling.split(q),
        pool,
        where,
        tiling.tiles,
        page_offset,
        attention=attention,
        sinks=sinks,
        scales=scales,
    )
    return tiling.join(out)


def key_and_value_dims(layout: PoolLayout) -> tuple[int, int]:
    """The widths of "k" and "v" in a pool that holds them; NotImplementedError for any other pool."""
    lanes = {name: end - start for name, start, end in layout.slices}
    if set(lanes) != {"k", "v"}:
        raise NotImplementedError(
            f"attend needs a pool of k and v side by side, this one holds {sorted(lanes)}; "
            "name the group's tensors k and v, or read them with kvjax.layout.view"
        )
    return lanes["k"], lanes["v"]


def choose_backend(platform: str, device_kind: str) -> Backend:
    """The backend for a device: its kernels on a TPU or GPU kvjax knows, XLA on a CPU.

    Raises:
      NotImplementedError: an accelerator without kernels; ask for backend="xla" to run there all the same.
    """
    if platform == "cpu":
        return "xla"
    known: list[TpuFacts | GpuFacts] = [*TPUS.values(), *GPUS.values()]
    for facts in known:
        if facts.device_kind == device_kind:
            return facts
    raise NotImplementedError(
        f"no kernels for {device_kind!r}; known: {', '.join(facts.device_kind for facts in known)}. "
        'Pass backend="xla" to use plain XLA attention'
    )


def _choose(backend: Backend, grant: Grant, group: int, *, of_runs: bool) -> tuple[int, Callable[..., Array]]:
    """Tokens a tile of queries, and what attends over pages, or over runs of them."""
    if backend == "xla":
        return tile_size(grant.packed, grant.rows), xla.paged_attention
    # Imported when used: a backend's Pallas dialect is of no concern to the others.
    kernel: Any
    if isinstance(backend, TpuFacts):
        from pallas_kernels.tpu import paged_attention as kernel
        from pallas_kernels.tpu.extent_attention import extent_attention

        attend = partial(extent_attention if of_runs else kernel.paged_attention, facts=backend)
    else:
        from pallas_kernels.gpu import paged_attention as kernel

        attend = partial(kernel.paged_attention, facts=backend)
    return tile_size(grant.packed, grant.rows, max(1, kernel.TILE_LINES // group)), attend
