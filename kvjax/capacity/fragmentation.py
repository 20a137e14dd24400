"""What pages waste: bounds, measurements on lengths, and the page size at which a trace wastes least.

A sequence fills all of its pages but the last.  With n sequences and q tokens a page, the empty positions are at most
F_max = n(q − 1), and E[F] ≈ n(q − 1)/2 where lengths are spread evenly over a page (internal fragmentation; Kwon et al.
2023, section 4).  Smaller pages waste less and cost more elsewhere: longer tables, more allocations, shorter copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE_SIZES = tuple(2**power for power in range(11))
TABLE_ENTRY_BYTES = 4

COPY_OVERHEAD_BYTES = 4 * 1024
"""What a page's copy costs beside its bytes, as bytes that would stream in that time.

An assumption for want of a measurement on the device: published latent-attention kernels lose 17–24 % with pages of 16
tokens, which are 18,432 B there.  Older kernels lose more (vLLM's 20–26 % with pages of 16; Kwon et al. 2023, section
7.1).  Measure yours and pass it on.
"""
KNEE = 0.01
"""The knee is the smallest page whose cost is within this share of the tokens' bytes of the least."""


def worst_waste(sequences: int, page_size: int) -> int:
    """F_max: the most positions that n sequences can leave empty."""
    return sequences * (page_size - 1)


def expected_waste(sequences: int, page_size: int) -> float:
    """E[F]: positions left empty where lengths are spread evenly."""
    return sequences * (page_size - 1) / 2


def measured_waste(lengths: Sequence[int], page_size: int) -> int:
    """Positions that sequences of these lengths leave empty."""
    return sum(-length % page_size for length in lengths)


def utilisation(lengths: Sequence[int], page_size: int) -> float:
    """Effective over allocated bytes: positions with a token, of those in held pages.  1 where nothing is held."""
    used = sum(lengths)
    return used / (used + measured_waste(lengths, page_size)) if used else 1.0


@dataclass(frozen=True, slots=True)
class PageCost:
    """What a page size costs on given lengths, each as a share of the bytes of the tokens themselves.

    Attributes:
      page_size: tokens a page.
      tail: empty positions of last pages.
      table: page-table entries.
      copy: what the copies of pages cost beside their bytes, when a step reads everything.
      pages_per_token: allocations a generated token.
      utilisation: effective over allocated bytes.
    """

    page_size: int
    tail: float
    table: float
    copy: float
    pages_per_token: float
    utilisation: float

    @property
    def total(self) -> float:
        return self.tail + self.table + self.copy

    @property
    def kernel_efficiency(self) -> float:
        """Share of a step's reading time that moves bytes."""
        return 1 / (1 + self.copy)


def sweep(
    lengths: Sequence[int],
    *,
    bytes_per_token: float,
    copy_bytes_per_token: float,
    page_sizes: Sequence[int] = PAGE_SIZES,
    copy_overhead_bytes: int = COPY_OVERHEAD_BYTES,
    exact: bool = True,
) -> tuple[PageCost, ...]:
    """The costs of every page size on these lengths.

    Args:
      lengths: tokens of each sequence; the trace.
      bytes_per_token: over all layers of a device.
      copy_bytes_per_token: that one copy fetches: one layer's.
      page_sizes: to try.
      copy_overhead_bytes: see `COPY_OVERHEAD_BYTES`.
      exact: the lengths are what is served; otherwise they are round figures, and last pages are expected half empty.

    Raises:
      ValueError: no lengths, one below 1, or sizes that are not positive.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a sweep needs lengths of at least 1, got {list(lengths)[:5]}")
    if bytes_per_token <= 0 or copy_bytes_per_token <= 0 or not page_sizes or min(page_sizes) < 1:
        raise ValueError(f"{bytes_per_token=}, {copy_bytes_per_token=} and {page_sizes=} must be positive")
    tokens = sum(lengths)
    costs = []
    for page_size in page_sizes:
        pages = sum(-(-length // page_size) for length in lengths)
        empty = measured_waste(lengths, page_size) if exact else expected_waste(len(lengths), page_size)
        costs.append(
            PageCost(
                page_size=page_size,
                tail=empty / tokens,
                table=pages * TABLE_ENTRY_BYTES / (tokens * bytes_per_token),
                copy=pages * copy_overhead_bytes / (tokens * copy_bytes_per_token),
                pages_per_token=1 / page_size,
                utilisation=tokens / (tokens + empty),
            )
        )
    return tuple(costs)


def knee(costs: Sequence[PageCost]) -> PageCost:
    """The smallest page whose total cost is within `KNEE` of the least; `costs` in order of page size."""
    least = min(cost.total for cost in costs)
    return next(cost for cost in costs if cost.total <= least + KNEE)
