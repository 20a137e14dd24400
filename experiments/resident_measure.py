"""A virtual space in use, and what it costs in memory by the kernel's own account.  Linux."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Resident:
    """Bytes of memory of a virtual space.

    Attributes:
      blocks: of the file that holds its page-groups.
      rss, pss: of its addresses; see proc_pid_smaps(5).
    """

    blocks: int
    rss: int
    pss: int


def serve(
    *, rows: int, max_context: int, used: int, shared: int = 0, page_group_bytes: int = 65536
) -> tuple[Any, Resident]:
    """A virtual space whose rows hold `used` tokens each, all of them written; and its memory.  The caller closes it.

    2 KiB a token: two layers of two heads, K and V of 64 floats.
    """
    import kvjax
    from kvjax.pages import raise_for_status
    from kvjax.virtual import VirtualSpace

    spec = kvjax.CacheSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    pages = 2 * rows * (used * spec.bytes_per_token // page_group_bytes + 1)  # twice what they need
    space = VirtualSpace(
        spec, rows=rows, num_pages=pages, max_context=max_context, page_group_bytes=page_group_bytes, lookahead=0
    )
    for row in range(rows):
        space.admit(used, shared=shared if row else 0, row=row)
    lengths = np.full(rows, used)
    first = np.where(np.arange(rows) == 0, lengths, 0)
    for wanted in (first, lengths):
        if wanted is lengths and shared:
            for row in range(1, rows):
                raise_for_status(space.alias(0, row, shared), operation="sharing the prefix")
        raise_for_status(space.step(wanted), operation="step")
        _write(space, wanted)
        space.commit()
    space.settle()
    return space, resident(space)


def _write(space: Any, lengths: np.ndarray) -> None:
    """Writes every layer of the tokens that a step of these lengths opened."""
    import jax
    import jax.numpy as jnp

    import kvjax

    tokens = np.maximum(lengths - space.length, 0)

    @jax.jit
    def write(cache: Any, tokens: Any) -> Any:
        cache, grant = kvjax.reserve(cache, tokens, max_tokens=most)
        ones = jnp.ones((most, 2, 64), jnp.float32)
        for layer in range(2):
            cache = kvjax.write(cache, layer, grant, k=ones, v=ones)
        return cache.order

    if most := int(tokens.sum()):
        space.follow(write(space.cache(), tokens.astype(np.int32)))


def resident(space: Any) -> Resident:
    """The memory of a space, as the kernel counts it now."""
    rss = pss = 0
    for array in space.cache().memory.values():
        start = array.unsafe_buffer_pointer()
        each = smaps(start, start + array.nbytes)
        rss, pss = rss + each["Rss"], pss + each["Pss"]
    return Resident(space.figures().resident_bytes, rss, pss)


def smaps(start: int, end: int) -> dict[str, int]:
    """Bytes of each kind in the memory areas that lie in [start, end), from /proc/self/smaps."""
    found = {"Rss": 0, "Pss": 0}
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            name, *values = line.split()
            if "-" in name and not name.endswith(":"):
                first, last = (int(edge, 16) for edge in name.split("-"))
                inside = start <= first and last <= end
            elif inside and name[:-1] in found:
                found[name[:-1]] += int(values[0]) << 10
    return found
