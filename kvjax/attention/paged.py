"""Attention over a paged cache: one op, three backends.

XLA runs anywhere; on TPU and GPU the Pallas kernels stream pages when a step brings about one token a row
(packed ≤ rows), and XLA serves prefill.  All give the same result: the choice is one of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from kvjax.attention.xla import tiled_attention
from kvjax.grant import Grant
from kvjax.layout import PoolLayout
from kvjax.storage import Pool, gather_pages
from pallas_kernels.hardware import GPUS, TPUS, GpuFacts, TpuFacts

Backend = Literal["xla"] | TpuFacts | GpuFacts
"""Which code attends: plain XLA, or the kernels for the chip whose facts are given."""

BLOCK_TOKENS = 128
"""Positions the XLA path reads at a time, rounded to whole pages."""


def paged_attention(
    q: Float[Array, "packed q_heads key_dim"],
    grant: Grant,
    pool: Pool,
    layout: PoolLayout,
    pages: Int32[Array, "rows width"],
    page_offset: Int32[Array, ""] | int,
    *,
    scale: float,
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
      scale: multiplies the logits.
      backend: which code attends.
    """
    lanes = {name: (start, end) for name, start, end in layout.slices}
    if set(lanes) != {"k", "v"}:
        raise NotImplementedError(f"attend needs a pool of k and v side by side, this one holds {sorted(lanes)}")
    key_dim, value_dim = (end - start for start, end in (lanes["k"], lanes["v"]))
    if q.shape[-1] != key_dim:
        raise ValueError(f"q has head dimension {q.shape[-1]}, the cache's keys have {key_dim}")
    if pool.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(
            f"attend does not dequantise yet: a cache of {pool.dtype} can be written, not attended"
        )
    if backend != "xla" and grant.packed <= grant.rows:
        return _decode_kernel(backend)(
            q,
            pool,
            pages,
            grant.row,
            grant.visible,
            jnp.asarray(page_offset, jnp.int32),
            value_dim=value_dim,
            scale=scale,
            facts=backend,
        )

    page_size = pool.shape[2]
    count = max(1, BLOCK_TOKENS // page_size)
    width = pages.shape[1]

    def fetch(row: Int32[Array, " tiles"], index: Int32[Array, ""]) -> tuple[Array, Array]:
        logical = index * count + jnp.arange(count, dtype=jnp.int32)
        ids = pages.at[row[:, None], logical % width].get(mode="clip") + page_offset
        block = gather_pages(pool, ids)
        return block[..., slice(*lanes["k"])], block[..., slice(*lanes["v"])]

    return tiled_attention(
        q, grant, fetch, block=count * page_size, kv_heads=layout.heads, value_dim=value_dim, scale=scale
    )


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


def _decode_kernel(backend: TpuFacts | GpuFacts) -> Callable[..., Array]:
    # Imported when used: a backend's Pallas dialect is of no concern to the others.
    if isinstance(backend, TpuFacts):
        from pallas_kernels.tpu.paged_decode import paged_decode
    else:
        from pallas_kernels.gpu.paged_decode import paged_decode  # type: ignore[no-redef,assignment]
    return paged_decode
