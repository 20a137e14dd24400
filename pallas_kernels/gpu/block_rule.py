"""The rule that chooses how many warpgroups compute, and how deep the rings are."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.tensor_core import TILE, answer_lanes
from pallas_kernels.hardware import KIB, GpuFacts

RESERVED_BYTES = 4 * KIB  # of a thread block's shared memory: barriers, alignment, reductions
MOST_BUFFERS = 8


def consumer_warpgroups(value_dim: int) -> int:
    """Two warpgroups, so that one has the tensor cores while the other takes exponentials; one for wide values.

    The sums of 64 lines × 256 lanes alone are 128 registers of a thread, more than two such warpgroups have room for;
    and of heads so wide, one alone computes a block faster than memory delivers it.
    """
    return 2 if value_dim <= 192 else 1


def ring_buffers(
    key_dim: int, value_dim: int, dtype: Any, pool_dtype: Any, scale_rings: int, consumers: int, facts: GpuFacts
) -> int:
    """The blocks of keys, and of values, that a thread block has room for: all that memory allows, up to
    MOST_BUFFERS, and a multiple of `consumers`.

    There is one thread block a multiprocessor, so its shared memory is the ring's but for queries, weights and answers.
    Deep rings keep copies in flight: an H200 delivers 36 GB/s to each multiprocessor, so about 36 KiB must be under way
    to hide a latency of 1 µs; four buffers of 64 tokens × 256 lanes in bfloat16 are 128 KiB.

    Raises ValueError if there is no room for one each.
    """
    size, pool_size = jnp.dtype(dtype).itemsize, jnp.dtype(pool_dtype).itemsize
    buffer = BLOCK * ((key_dim + value_dim) * pool_size + 4 * scale_rings)
    if size == 4:
        other = 4 * (key_dim + consumers * value_dim)
    else:
        own = TILE * (BLOCK * size + 4 * answer_lanes(value_dim) + 4)
        if pool_size == 1:
            own += BLOCK * (key_dim + value_dim) * size
        other = TILE * (key_dim * size + 4) + consumers * own
    buffers = min((facts.shared_memory_bytes_per_block - RESERVED_BYTES - other) // buffer, MOST_BUFFERS)
    if buffers < consumers:
        raise ValueError(
            f"{key_dim=}, {value_dim=}: a buffer of {buffer} bytes and {other} more do not fit in the "
            f"{facts.shared_memory_bytes_per_block} of {facts.name}: take smaller heads"
        )
    return buffers // consumers * consumers
