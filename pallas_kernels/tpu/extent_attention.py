"""Contiguous-virtual attention for TPU: tiles of queries over keys and values in runs of adjacent pages.

To vAttention (Prabhu et al. 2024, arXiv:2405.04437) a sequence is one range of virtual memory, which lets a kernel
copy as much at once as it likes. A TPU shows its user no virtual memory; lists of runs, kept short by an allocator that
prefers adjacent pages, come to the same for all but the blocks in which a run ends.
"""

from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Runs, Scales, Tiles, check_arguments
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.attend_tiles import attend_tiles
from pallas_kernels.tpu.extent_stream import ExtentStream
from pallas_kernels.tpu.running_softmax import LANES


def extent_attention(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    runs: Runs,
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
    """Causal attention as `paged_attention` computes it, of rows whose pages are listed as runs.

    Args:
      q, pool, tiles, attention, sinks, scales, facts, pages_per_block, interpret: as in `paged_attention`.
      runs: the pages of each row, starts before `page_offset` is added. Those that hold pages which a tile sees, and
        all before them, are trusted. The lists stay in HBM; a `max_runs` that is not a multiple of 128 costs a padded
        copy of them.
      page_offset: layer × pages per layer.

    A block whose pages all lie in one run, and are all seen, is one copy from HBM; one that lies in several, or is seen
    in part, is one for each stretch of adjacent pages that are seen. Scales per token come by as many copies more, or,
    where a page has more than 128 of them, by one a page. Cost beside that of `paged_attention`: each tile walks the
    runs of its row from the first one on, some 20 instructions a run and a small copy for each 128.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for a pool of
    float16.
    """
    check_arguments(q, pool, runs, tiles, attention=attention, sinks=sinks, scales=scales, lane_multiple=LANES)
    return attend_tiles(
        q,
        pool,
        (runs.starts, runs.ends),
        (runs.num_runs,),
        tiles,
        page_offset,
        stream=ExtentStream,
        attention=attention,
        sinks=sinks,
        scales=scales,
        facts=facts,
        pages_per_block=pages_per_block,
        interpret=interpret,
        name="extent_attention",
    )
