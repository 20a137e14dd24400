"""The decode shapes of the static report."""

from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Runs, Tiles


@dataclass(frozen=True)
class DecodeCase:
    """One query token for each of `rows`, whose table is `tokens` positions wide; everything in bfloat16."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    rows: int = 64
    tokens: int = 16_384

    @property
    def name(self) -> str:
        rest = "" if (self.rows, self.tokens) == (64, 16_384) else f", {self.rows} × {self.tokens:,} tokens"
        return f"{self.q_heads}:{self.kv_heads}×{self.head_dim} page {self.page_size}{rest}"

    @property
    def page_bytes(self) -> int:
        """Keys and values of all heads."""
        return self.kv_heads * self.page_size * 2 * self.head_dim * 2

    @property
    def total_pages(self) -> int:
        """Of a pool of 1 GiB."""
        return 2**30 // self.page_bytes

    @property
    def width(self) -> int:
        return self.tokens // self.page_size

    def record(self) -> dict[str, Any]:
        return {"shape": self.name, **asdict(self), "page_bytes": self.page_bytes}


CASES = [
    DecodeCase(q_heads, kv_heads, head_dim, page_size)
    for q_heads, kv_heads, head_dim in ((32, 8, 128), (9, 3, 64), (8, 1, 128))
    for page_size in (16, 128)
]
# The page table that does not fit in scalar memory.
MILLION = DecodeCase(32, 8, 128, 16, rows=256, tokens=2**20)


def decode_arguments(case: DecodeCase, *, lane_multiple: int, in_runs: bool = False) -> tuple[Any, ...]:
    """The arguments of this package's kernels: q, pool, pages or runs, tiles and page_offset."""
    lanes = -(-2 * case.head_dim // lane_multiple) * lane_multiple
    per_row = jax.ShapeDtypeStruct((case.rows,), jnp.int32)
    per_page = jax.ShapeDtypeStruct((case.rows, case.width), jnp.int32)
    return (
        jax.ShapeDtypeStruct((case.rows, 1, case.q_heads, case.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((case.total_pages, case.kv_heads, case.page_size, lanes), jnp.bfloat16),
        Runs(per_page, per_page, per_row) if in_runs else per_page,
        Tiles(per_row, per_row, per_row),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
