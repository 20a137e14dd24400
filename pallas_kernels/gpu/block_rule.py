"""The rule that chooses how many thread blocks share a multiprocessor, and how deep their rings are."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.tensor_core import TILE, answer_lanes
from pallas_kernels.hardware import KIB, GpuFacts

RESERVED_BYTES = 4 * KIB  # of a thread block's shared memory: 1 KiB the driver's, the rest barriers and alignment
MOST_BUFFERS = 6


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the rule chose.

    Attributes:
      per_multiprocessor: thread blocks that share one.
      buffers: blocks of keys, and of values, that a thread block has room for.
    """

    per_multiprocessor: int
    buffers: int


def choose_blocks(
    key_dim: int, value_dim: int, dtype: Any, pool_dtype: Any, scale_rings: int, facts: GpuFacts
) -> Blocks:
    """Two thread blocks a multiprocessor if each has room for two buffers, else one; then as deep as memory allows.

    With two, one computes while the other waits at a barrier, and while one begins an item. Deep rings keep copies in
    flight: an H200 delivers 36 GB/s a multiprocessor, so that about 36 KiB must be under way to hide 1 µs; two thread
    blocks with two buffers of 64 tokens × 256 lanes in bfloat16 have 128 KiB.

    Raises ValueError if not even one fits.
    """
    size, pool_size = jnp.dtype(dtype).itemsize, jnp.dtype(pool_dtype).itemsize
    buffer = BLOCK * ((key_dim + value_dim) * pool_size + 4 * scale_rings)
    if size == 4:
        other = 4 * (key_dim + value_dim)
    else:
        other = TILE * (key_dim * size + BLOCK * size + 4 * answer_lanes(value_dim) + 8)
        if pool_size == 1:
            other += BLOCK * (key_dim + value_dim) * size
    for per_multiprocessor in (2, 1):
        room = min(facts.shared_memory_bytes // per_multiprocessor - KIB, facts.shared_memory_bytes_per_block)
        buffers = (room - RESERVED_BYTES - other) // buffer
        if buffers >= per_multiprocessor:
            return Blocks(per_multiprocessor, min(buffers, MOST_BUFFERS))
    raise ValueError(
        f"{key_dim=}, {value_dim=}: a buffer of {buffer} bytes and {other} more do not fit in the "
        f"{facts.shared_memory_bytes_per_block} of {facts.name}: take smaller heads"
    )
