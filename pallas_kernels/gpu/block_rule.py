"""The rule that chooses how many warpgroups compute, and how deep the rings are."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.tensor_core import TILE, answer_lanes
from pallas_kernels.hardware import KIB, GpuFacts

RESERVED_BYTES = 4 * KIB  # of a thread block's shared memory: barriers, alignment, reductions
MOST_BUFFERS = 8
WIDEST_FOR_TWO = 128  # lanes of values


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the rule chose: warpgroups that compute, and blocks of keys, and of values, that there is room for."""

    consumers: int
    buffers: int


def choose_blocks(
    key_dim: int, value_dim: int, dtype: Any, pool_dtype: Any, scale_rings: int, facts: GpuFacts
) -> Blocks:
    """Two warpgroups that compute if they fit, and rings as deep as memory allows, up to MOST_BUFFERS.

    With two, one has the tensor cores while the other takes exponentials. Values wider than WIDEST_FOR_TWO get one,
    which may then have 255 registers a thread: 64 lines × 256 lanes of sums alone take 128; and one alone computes
    blocks so wide faster than memory delivers them. There is one thread block a multiprocessor, so its shared memory is
    the rings' but for queries, weights and answers. Deep rings keep copies in flight: an H200 delivers 36 GB/s to each
    multiprocessor, so about 36 KiB must be under way to hide a latency of 1 µs; four buffers of 64 tokens × 256 lanes
    in bfloat16 are 128 KiB. Each warpgroup has the same number of buffers.

    Raises ValueError if there is no room for one buffer.
    """
    size, pool_size = jnp.dtype(dtype).itemsize, jnp.dtype(pool_dtype).itemsize
    buffer = BLOCK * ((key_dim + value_dim) * pool_size + 4 * scale_rings)
    if size == 4:
        query, own = 4 * key_dim, 4 * value_dim
    else:
        query, own = TILE * (key_dim * size + 4), TILE * (BLOCK * size + 4 * answer_lanes(value_dim) + 4)
        if pool_size == 1:
            own += BLOCK * (key_dim + value_dim) * size
    for consumers in (2, 1) if value_dim <= WIDEST_FOR_TWO else (1,):
        room = facts.shared_memory_bytes_per_block - RESERVED_BYTES - query - consumers * own
        buffers = min(room // buffer, MOST_BUFFERS) // consumers * consumers
        if buffers > 0:
            return Blocks(consumers, buffers)
    raise ValueError(
        f"{key_dim=}, {value_dim=}: a buffer of {buffer} bytes and {query + own} more do not fit in the "
        f"{facts.shared_memory_bytes_per_block} of {facts.name}: take smaller heads"
    )
