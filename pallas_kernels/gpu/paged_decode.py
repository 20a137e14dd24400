"""Paged decode attention for Hopper GPUs (Pallas Mosaic GPU): one query token each, keys and values in pages.

Pages as in Kwon et al. 2023 (arXiv:2309.06180), a running softmax as in Dao et al. 2022 (arXiv:2205.14135), long
contexts split over thread blocks and merged afterwards as in Flash-Decoding (Dao et al. 2023). The products differ with
the dtype and live in files of their own; this one checks, plans and merges.
"""

from functools import partial

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.arguments import check_decode_arguments
from pallas_kernels.gpu import float32_decode, tensor_core_decode
from pallas_kernels.gpu.page_stream import BLOCK
from pallas_kernels.hardware import KIB, GpuFacts

HOPPER = (9, 0)
THREAD_BLOCKS_PER_MULTIPROCESSOR = 2  # so that one computes while the other waits
MAX_BUFFERS = 4
MAX_GRID = 65_535  # thread blocks along the grid's axes of queries and of splits
RESERVED_BYTES = 5 * KIB  # of a thread block's shared memory: 1 KiB the driver's, the rest barriers and alignment


def paged_decode(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    page_offset: Int32[Array, ""],
    *,
    value_dim: int,
    scale: float,
    facts: GpuFacts,
    splits: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "queries q_heads value_dim"]:
    """Attention of one token a query over the first `context` positions of its row.

    Args:
      q: bfloat16 or float32; heads of 64 or 128. Query head h reads KV head h // (q_heads / kv_heads).
      pool: the pages of all layers, in the dtype of q; pages of 16, 32, 64 or 128 tokens. A slot holds its key in lanes
        [0, key_dim) and its value in lanes [key_dim, key_dim + value_dim), and nothing else.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries at or past
        ceil(context / page_size) may hold any number. It stays in GPU memory.
      row: the row each query belongs to; queries may share one. Out of range for a padding query, whose context is 0.
      context: how many positions each query sees, at most width × page_size. 0 gives exactly zero, and no page is read.
      page_offset: layer × pages per layer.
      value_dim: lanes of a value, 64 or 128.
      scale: what logits are multiplied by.
      facts: the GPU that the kernel is compiled for.
      splits: how many thread blocks share each context; None fills the GPU. Every split of a context is of the same
        size, to a block of 64 tokens.
      interpret: as in `plgpu.kernel`: its parameters to run without a GPU, None to run on one.

    Softmax statistics are float32, and so are partial results. bfloat16 products accumulate in float32 on the tensor
    cores; float32 products stay off them and are exact to float32. Cost: each query reads the pages of its context
    once a KV head in bfloat16, once a query head in float32 (the copies that follow the first mostly hit the L2 cache),
    and computes whole blocks of 64 tokens. Beside the result, splits × queries × q_heads × (value_dim + 1) float32 of
    temporaries when there is more than one split.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for a GPU that is
    not a Hopper.
    """
    check_arguments(q, pool, pages, row, context, value_dim=value_dim, facts=facts, splits=splits)
    splits = splits or default_splits(q, pool, pages, facts)
    key_dim, lanes = q.shape[-1], pool.shape[-1]
    if q.dtype == jnp.float32:
        other_bytes = float32_decode.scratch_bytes(key_dim, value_dim)
        decode = float32_decode.decode
    else:
        other_bytes = tensor_core_decode.scratch_bytes(key_dim)
        decode = partial(tensor_core_decode.decode, out_dtype=jnp.float32 if splits > 1 else q.dtype)
    buffers = ring_buffers(BLOCK * lanes * q.dtype.itemsize, other_bytes, facts)
    arrays = (q, pool, pages, row, context, page_offset)
    out, log_total = decode(
        *arrays, value_dim=value_dim, scale=scale, splits=splits, buffers=buffers, interpret=interpret
    )
    return merge_splits(out, log_total).astype(q.dtype)


def default_splits(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    facts: GpuFacts,
) -> int:
    """The splits that give every multiprocessor its thread blocks, if contexts can be that long: at least 1."""
    queries, q_heads, _ = q.shape
    _, kv_heads, page_size, _ = pool.shape
    _, tiles = tensor_core_decode.tiling(q_heads // kv_heads)
    unsplit = queries * (q_heads if q.dtype == jnp.float32 else kv_heads * tiles)
    most = -(-pages.shape[1] * page_size // BLOCK)
    return max(1, min(THREAD_BLOCKS_PER_MULTIPROCESSOR * facts.multiprocessors // unsplit, most))


def ring_buffers(buffer_bytes: int, other_bytes: int, facts: GpuFacts) -> int:
    """The depth of the ring: 2 to MAX_BUFFERS, as shared memory allows, with two thread blocks a multiprocessor if it
    can hold them. ValueError if it cannot hold one."""
    for thread_blocks in range(THREAD_BLOCKS_PER_MULTIPROCESSOR, 0, -1):
        buffers = (facts.shared_memory_bytes // thread_blocks - RESERVED_BYTES - other_bytes) // buffer_bytes
        if buffers >= 2:
            return min(buffers, MAX_BUFFERS)
    raise ValueError(
        f"{buffer_bytes=}, {other_bytes=}; a ring of two buffers does not fit in {facts.shared_memory_bytes=} of "
        f"{facts.name}: take smaller heads"
    )


def merge_splits(
    out: Float[Array, "splits queries q_heads value_dim"], log_total: Float[Array, "splits queries q_heads"]
) -> Float[Array, "queries q_heads value_dim"]:
    """Weighs the splits of each context by their softmax denominators. All empty gives zero."""
    if out.shape[0] == 1:
        return out[0]
    top = log_total.max(axis=0)
    weights = jnp.exp2(log_total - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=0)
    return (weights[..., None] * out).sum(axis=0) / jnp.where(total > 0, total, 1)[..., None]


def check_arguments(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    *,
    value_dim: int,
    facts: GpuFacts,
    splits: int | None = None,
) -> None:
    """Raises, saying what to change, unless `paged_decode` takes arguments of these shapes and dtypes on this GPU."""
    if facts.compute_capability != HOPPER:
        raise NotImplementedError(
            f"{facts.name} has {facts.compute_capability=}; this kernel is for Hopper {HOPPER}: use the XLA path"
        )
    check_decode_arguments(q, pool, pages, row, context, value_dim=value_dim, lane_multiple=1)
    if splits is not None and not 1 <= splits <= MAX_GRID:
        raise ValueError(f"{splits=}; choose at least 1 and at most {MAX_GRID}, or None")
    if (queries := len(q)) > MAX_GRID:
        raise ValueError(f"{queries=}; a launch takes {MAX_GRID}: split the queries over several calls")
