"""Paged attention for TPU (Pallas Mosaic TPU): tiles of queries over keys and values that a page table finds."""

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles, check_arguments
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.attend_tiles import attend_tiles
from pallas_kernels.tpu.page_stream import PageStream
from pallas_kernels.tpu.running_softmax import LANES

TILE_LINES = 128  # query lines of one KV head that a tile had better not exceed: more make larger blocks of everything


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
    facts: TpuFacts,
    pages_per_block: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "tiles tokens q_heads value_dim"]:
    """Causal attention of tiles of queries over the pages of their rows, as `pallas_kernels.reference` defines it.

    Args:
      q: bfloat16, float32, or float16 with a quantised pool. Query head h reads KV head h // (q_heads / kv_heads).
        Places without a query may hold anything.
      pool: the pages of all layers, in the dtype of q, or quantised: float8_e4m3fn, float8_e5m2, int8. A slot holds
        its key in lanes [0, key_dim), its value in lanes [key_dim, key_dim + value_dim) and anything at all up to the
        next multiple of 128.
      pages: the page of each row's logical pages, before `page_offset` is added. Entries of pages that no query sees
        may hold any number; any other is trusted to be in the pool. It stays in HBM. A width that is not a multiple of
        128 costs a padded copy of the table.
      tiles: whose queries they are, and what they see.
      page_offset: layer × pages per layer.
      attention: scale, window, soft cap.
      sinks: a logit a query head that takes its share of the softmax and gives no value.
      scales: what quantised keys and values are multiplied by.
      facts: the chip that the kernel is compiled for.
      pages_per_block: pages that one step brings in and computes, a power of two; None takes the sizes that `facts`
        has tuned for this shape, or chooses by `block_rule`.
      interpret: as in `pl.pallas_call`.

    Softmax statistics are float32. Products of bfloat16 accumulate in float32; those of float32 and float16 queries are
    exact to float32 (Precision.HIGHEST). Cost: each tile reads the pages that its queries see once, and computes whole
    blocks of them; a chip with two cores shares the blocks of all tiles evenly between them.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for a pool of
    float16.
    """
    check_arguments(q, pool, pages, tiles, attention=attention, sinks=sinks, scales=scales, lane_multiple=LANES)
    return attend_tiles(
        q,
        pool,
        (pages,),
        (),
        tiles,
        page_offset,
        stream=PageStream,
        attention=attention,
        sinks=sinks,
        scales=scales,
        facts=facts,
        pages_per_block=pages_per_block,
        interpret=interpret,
        name="paged_attention",
    )
