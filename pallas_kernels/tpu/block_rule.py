"""The rule that chooses how many pages a step brings in, and how many steps ahead."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.hardware import TpuFacts


@dataclass(frozen=True, slots=True)
class Blocks:
    pages: int
    buffers: int
    vmem_bytes: int


def choose_blocks(q: Any, pool: Any, token_scales: tuple[Any, ...], *, value_dim: int, facts: TpuFacts, pages_per_block: int | None) -> Blocks:
    return Blocks(pages_per_block or max(1, 256 // pool.shape[2]), 2, facts.vmem_bytes * 3 // 4)
