"""The rule that chooses how many pages one step brings in and computes, and how many steps the copies run ahead."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.hardware import KIB, TpuFacts
from pallas_kernels.tpu.table_slices import SLICE
from pallas_kernels.tuned import AttentionShape

LANES = 128
COPY_SECONDS = 1e-6
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 128, 1024
MAX_LOGITS_BYTES = 256 * KIB
MAX_BUFFERS, MIN_BUFFERS = 4, 2
BUFFERS = (2, 4, 8)  # powers of two, to find the buffer of a block without dividing
PAGES = (1, 2, 4, 8, 16, 32, 64, SLICE)


def page_bytes(shape: AttentionShape) -> int:
    """Bytes of a page in vector memory, its rows of scales included."""
    itemsize = jnp.dtype(shape.pool_dtype).itemsize
    scale_lanes = _round_up(shape.kv_heads * shape.page_size, LANES)
    slots = _round_up(shape.page_size, 8 * (4 // itemsize))
    return shape.kv_heads * slots * _lanes(shape) * itemsize + shape.scales_per_token * 4 * scale_lanes


def working_bytes(shape: AttentionShape, block_tokens: int) -> int:
    """Bytes that a step needs beside its buffers: queries, answers, the running softmax, a head's products."""
    lines = _round_up(shape.lines, 16)
    key_lanes, value_lanes = _round_up(shape.key_dim, LANES), _round_up(shape.value_dim + shape.key_dim % LANES, LANES)
    queries_and_answers = 2 * (key_lanes + value_lanes) * (2 if shape.query_dtype == "bfloat16" else 4)
    halves = 2 * (2 * LANES + value_lanes) * 4  # written where a tile is cut between two cores
    softmax = (2 * LANES + value_lanes) * 4
    sinks = LANES * 4
    of_heads = shape.kv_heads * lines * (queries_and_answers + halves + softmax + sinks)
    # A head's logits and weights, its keys and values in the dtype of products and in float32; two heads overlap.
    of_products = 2 * block_tokens * (4 * lines + 2 * _lanes(shape)) * 4
    return of_heads + of_products


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the rule chose: pages a block, blocks in the ring, and the vector memory that the kernel may take."""

    pages: int
    buffers: int
    vmem_bytes: int


def choose_blocks(
    shape: AttentionShape, facts: TpuFacts, *, pages_per_block: int | None = None, buffers: int | None = None
) -> Blocks:
    """The sizes of blocks and of the ring for a shape on a chip, where they are not given.

    A block costs some 200 bundles whatever it holds (waits, the way through the loop, the latency of the first product
    and the last), so it has as many tokens, a power of two, as HBM delivers in COPY_SECONDS, from MIN_BLOCK_TOKENS (one
    register's lanes) to MAX_BLOCK_TOKENS (beyond, short contexts compute mostly masked slots), and no more than keep a
    head's logits within MAX_LOGITS_BYTES. The ring has MAX_BUFFERS blocks, so that copies run far enough ahead of the
    products to hide the latency of HBM. What does not fit the vector memory is halved: first the buffers, then the
    block.

    Raises ValueError if `pages_per_block` is not a power of two that makes blocks of whole registers, if `buffers` is
    not one of BUFFERS, or if nothing fits.
    """
    page_size = shape.page_size
    least = max(1, MIN_BLOCK_TOKENS // page_size)
    if pages_per_block is None:
        wanted = facts.hbm_bytes_per_second * COPY_SECONDS / page_bytes(shape)
        by_logits = MAX_LOGITS_BYTES // (4 * _round_up(shape.lines, 8) * page_size)
        most = min(wanted, by_logits, MAX_BLOCK_TOKENS // page_size)
        largest = max(least, _power_of_two(most))
        smallest = least
    elif pages_per_block in PAGES and pages_per_block >= least:
        largest = smallest = pages_per_block
    else:
        raise ValueError(
            f"{pages_per_block=} of {page_size=}; choose a power of two from {least} to {SLICE} "
            f"(a block has at least {MIN_BLOCK_TOKENS} tokens), or None"
        )
    if buffers is not None and buffers not in BUFFERS:
        raise ValueError(f"{buffers=}; choose one of {BUFFERS}, or None")
    depths = (MAX_BUFFERS, MIN_BUFFERS) if buffers is None else (buffers,)
    available = facts.vmem_bytes * 7 // 8  # the rest is the compiler's: spilled registers, semaphores, its own scratch
    pages = largest
    while pages >= smallest:
        working = working_bytes(shape, pages * page_size)
        for depth in depths:
            if depth * pages * page_bytes(shape) + working <= available:
                return Blocks(pages, depth, available)
        pages //= 2
    needed = depths[-1] * smallest * page_bytes(shape) + working_bytes(shape, smallest * page_size)
    raise ValueError(
        f"{depths[-1]} blocks of {smallest} pages of {page_bytes(shape)} bytes, and {shape.lines} query lines for each "
        f"of {shape.kv_heads} KV heads, need {needed} bytes of vector memory; {facts.name} has {available} for them: "
        "take smaller pages or smaller tiles, or shard the heads"
    )


def allowed_sizes(shape: AttentionShape, facts: TpuFacts) -> list[dict[str, int]]:
    """All sizes that the rule lets a kernel take for a shape on a chip, as `choose_blocks` takes them."""
    sizes = [{"pages_per_block": pages, "buffers": buffers} for pages in PAGES for buffers in BUFFERS]
    return [one for one in sizes if _fits(shape, facts, one)]


def _fits(shape: AttentionShape, facts: TpuFacts, sizes: dict[str, int]) -> bool:
    try:
        choose_blocks(shape, facts, **sizes)
    except ValueError:
        return False
    return True


def _lanes(shape: AttentionShape) -> int:
    return _round_up(shape.key_dim + shape.value_dim, LANES)


def _power_of_two(most: float) -> int:
    """The largest power of two up to `most`, at least 1."""
    return 1 << max(0, int(most).bit_length() - 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
