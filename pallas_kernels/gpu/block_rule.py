"""The rule that chooses how many warpgroups compute, and how deep the rings are."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.tensor_core import TILE, answer_lanes
from pallas_kernels.hardware import KIB, GpuFacts
from pallas_kernels.tuned import AttentionShape

RESERVED_BYTES = 4 * KIB  # of a thread block's shared memory: barriers, alignment, reductions
MOST_BUFFERS = 8
WIDEST_FOR_TWO = 128  # lanes of values, and of keys that have scales a token


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the rule chose: warpgroups that compute, and blocks of keys, and of values, that there is room for."""

    consumers: int
    buffers: int


def choose_blocks(
    key_dim: int,
    value_dim: int,
    dtype: Any,
    pool_dtype: Any,
    scale_rings: int,
    facts: GpuFacts,
    *,
    consumers: int | None = None,
    buffers: int | None = None,
) -> Blocks:
    """Two warpgroups that compute if they fit, and rings as deep as memory allows, up to MOST_BUFFERS.

    With two, one has the tensor cores while the other takes exponentials. Values wider than WIDEST_FOR_TWO get one,
    which may then have 255 registers a thread: 64 lines × 256 lanes of sums alone take 128; and one alone computes
    blocks so wide faster than memory delivers them; so do wider keys with scales a token. There is one thread block a
    multiprocessor, so its shared memory is the rings' but for queries, weights and answers. Deep rings keep copies in
    flight: an H200 delivers 36 GB/s to each multiprocessor, so about 36 KiB must be under way to hide a latency of 1
    µs; four buffers of 64 tokens × 256 lanes in bfloat16 are 128 KiB. Each warpgroup has the same number of buffers.

    `consumers` and `buffers` are taken as they are given, within those bounds.

    Raises ValueError if there is no room for one buffer, or none for what is given.
    """
    size, pool_size = jnp.dtype(dtype).itemsize, jnp.dtype(pool_dtype).itemsize
    buffer = BLOCK * ((key_dim + value_dim) * pool_size + 4 * scale_rings)
    if size == 4:
        query, own = 4 * key_dim, 4 * value_dim
    else:
        query, own = TILE * (key_dim * size + 4), TILE * (BLOCK * size + 4 * answer_lanes(value_dim) + 4)
        if pool_size == 1:
            own += BLOCK * (key_dim + value_dim) * size
    wide = value_dim > WIDEST_FOR_TWO or (scale_rings > 0 and key_dim > WIDEST_FOR_TWO)
    for computing in (1,) if wide else (2, 1):
        room = facts.shared_memory_bytes_per_block - RESERVED_BYTES - query - computing * own
        most = min(room // buffer, MOST_BUFFERS) // computing * computing
        depth = most if buffers is None else buffers
        if consumers in (None, computing) and 0 < depth <= most and depth % computing == 0:
            return Blocks(computing, depth)
    if consumers is not None or buffers is not None:
        raise ValueError(
            f"{consumers=}, {buffers=} are not to be had for {key_dim=}, {value_dim=} on {facts.name}: choose other "
            "sizes, or None"
        )
    raise ValueError(
        f"{key_dim=}, {value_dim=}: a buffer of {buffer} bytes and {query + own} more do not fit in the "
        f"{facts.shared_memory_bytes_per_block} of {facts.name}: take smaller heads"
    )


def allowed_sizes(shape: AttentionShape, facts: GpuFacts) -> list[dict[str, int]]:
    """All sizes that the rule lets a kernel take for a shape on a GPU: `workers`, and what `choose_blocks` takes."""
    rule = shape.key_dim, shape.value_dim, shape.query_dtype, shape.pool_dtype, shape.scales_per_token, facts
    found = []
    for consumers, buffers in product((2, 1), range(1, MOST_BUFFERS + 1)):
        try:
            choose_blocks(*rule, consumers=consumers, buffers=buffers)
        except ValueError:
            continue
        for waves in (1, 2):
            found.append({"workers": waves * facts.multiprocessors, "consumers": consumers, "buffers": buffers})
    return found
