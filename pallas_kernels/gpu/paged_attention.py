"""Paged attention for Hopper GPUs (Pallas Mosaic GPU): tiles of queries over keys and values in pages.

Pages as in Kwon et al. 2023 (arXiv:2309.06180); `attend_items` says how it is computed.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles, check_arguments
from pallas_kernels.gpu.attend_items import TILE_LINES, attend_items
from pallas_kernels.gpu.page_stream import Pages
from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.hardware import GpuFacts
from pallas_kernels.tuned import AttentionShape

__all__ = ["TILE_LINES", "paged_attention"]


def paged_attention(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    tiles: Tiles,
    page_offset: Int32[Array, ""],
    *,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None = None,
    scales: Scales | None = None,
    facts: GpuFacts,
    workers: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries over the pages of their rows, as `pallas_kernels.reference` defines it.

    Args:
      q: bfloat16, float16 or float32. Query head h reads KV head h // (q_heads / kv_heads). Places without a query may
        hold anything.
      pool: the pages of all layers, in the dtype of q, or quantised: float8_e4m3fn, float8_e5m2, int8. A slot holds
        its key in lanes [0, key_dim) and its value in lanes [key_dim, key_dim + value_dim), and nothing else.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries of pages that no query sees
        may hold any number; any other is trusted to be in the pool. It stays in GPU memory.
      tiles: whose queries they are, and what they see.
      page_offset: layer × pages per layer.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value.
      scales: what quantised keys and values are multiplied by.
      facts: the GPU that the kernel is compiled for.
      workers: thread blocks that share the work; None takes what `facts` has tuned for this shape, or one a
        multiprocessor.
      interpret: as in `plgpu.kernel`: its parameters to run without a GPU, None to run on one.

    Softmax statistics are float32, and so are partial results. bfloat16 and float16 products accumulate in float32 on
    the tensor cores; float32 products stay off them and are exact to float32. Quantised keys and values are exact in
    the dtype of q. Cost: each tile reads the pages that its queries see once a KV head for each 64 query lines, in
    float32 once a query line (the copies that follow the first mostly hit the L2 cache), and computes whole blocks of
    64 tokens. Beside the result, twice its size and a piece more for each worker, in float32, of temporaries.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for a GPU that is
    not a Hopper.
    """
    check_arguments(q, pool, pages, tiles, attention=attention, sinks=sinks, scales=scales, lane_multiple=1)
    both = (scales.key, scales.value) if scales else (jnp.float32(1), jnp.float32(1))
    key_scales, value_scales = (scale if scale.ndim == 2 else None for scale in both)
    key_scale, value_scale = (jnp.float32(1) if scale.ndim == 2 else scale for scale in both)
    return attend_items(
        q,
        Pages(pool, key_scales, value_scales, pages, jnp.reshape(page_offset, 1)),
        tiles,
        shape=AttentionShape.of(q, pool, attention, scales),
        most_blocks=-(-pages.shape[1] * pool.shape[2] // BLOCK),
        attention=attention,
        sinks=sinks,
        scales=(key_scale, value_scale),
        facts=facts,
        workers=workers,
        interpret=interpret,
    )
