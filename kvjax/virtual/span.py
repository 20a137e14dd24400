"""What one token's record looks like, and how records fill a span.  Plain Python, no arrays.

A row's span is `[tokens, groups, pools, layers, heads, lanes]`: token-major, all layers and tensors of a token side by
side (vAttention's "megacache" order, Prabhu et al., ASPLOS 2025, §8).  Growth is then one contiguous front a row, so
that a page-group of bytes b adds b ÷ record tokens to all layers at once.  With one region a layer and tensor, as in
the paper's main design, the same growth takes a page-group and a mapping call for each of them: for 32 layers of
8 × 128 bf16 a 2 MiB page-group is 16 tokens here and 1,024 there (a growth unit of 64 MiB, K and V side by side), and
32 times as many mappings are needed for equal waste.  Attention reads K and V of one layer with a token stride; at
8 × 128 bf16 each token still is 4 KiB in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from kvjax.inputs import static_size
from kvjax.layout import PoolLayout, canonical_layout
from kvjax.spec import CacheSpec

_ALIGNMENT = 128
"""Bytes; what bulk copies on a GPU ask of a token's record and of a pool in it, and more than XLA asks of an array."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where one pool of one group stands in a token's record, all its layers in order.

    Attributes:
      pool: heads, lanes and dtype; the tensors in it.
      offset: bytes from the record's beginning to layer 0.
    """

    pool: PoolLayout
    offset: int

    def elements(self) -> tuple[int, int]:
        """(offset of layer 0, distance from layer to layer), in elements of the pool's dtype."""
        size = np.dtype(self.pool.dtype).itemsize
        return self.offset // size, self.pool.heads * self.pool.lanes


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """Sizes of a virtual space; all bytes and counts are exact, nothing is rounded later.

    Attributes:
      spec: what the model caches.
      places: for each group, its pools.
      record_bytes: bytes of one token, all layers and tensors, padded to 128.
      page_tokens: tokens a page-group.
      page_bytes: bytes a page-group: a multiple of the platform's granularity that holds whole tokens, and
        whole blocks of them where reading past memory is a fault.
      width: page-groups a row may hold.
      span_pages: page-groups of address space a row: `width`, rounded up to whole attention blocks, at least two.
      rows: spans.
      max_context: tokens a row may hold.
    """

    spec: CacheSpec
    places: tuple[tuple[PoolPlace, ...], ...]
    record_bytes: int
    page_tokens: int
    page_bytes: int
    width: int
    span_pages: int
    rows: int
    max_context: int

    @property
    def span_tokens(self) -> int:
        """Token positions of address space a row."""
        return self.span_pages * self.page_tokens

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtype names of the pools, each once."""
        return tuple(dict.fromkeys(place.pool.dtype for group in self.places for place in group))

    def shape(self, dtype: str) -> tuple[int, int, int]:
        """The whole reservation as one array of a dtype: [rows, span tokens, elements a record]."""
        return self.rows, self.span_tokens, self.record_bytes // np.dtype(dtype).itemsize


def span_layout(
    spec: CacheSpec,
    *,
    rows: int,
    max_context: int,
    page_group_bytes: int,
    granularity: int,
    block: int,
    reads_at_once: int,
) -> SpanLayout:
    """Sizes for a spec.

    Args:
      spec: what the model caches.
      rows: spans.
      max_context: tokens a row may hold.
      page_group_bytes: least bytes a page-group; rounded up to whole tokens and whole granules.
      granularity: bytes the platform maps at a time.
      block: tokens attention reads at a time; a span is a whole number of them, so that no read crosses into the next.
      reads_at_once: tokens that are read together and must all be memory; a page-group is a whole number of them.

    Raises:
      ValueError: a size below 1.
      NotImplementedError: a window: records of a token are one piece, so the past of one group cannot be dropped alone.
    """
    rows, max_context = static_size("rows", rows), static_size("max_context", max_context)
    page_group_bytes = static_size("page_group_bytes", page_group_bytes)
    places, end = [], 0
    for group in spec.groups:
        if group.window is not None:
            raise NotImplementedError(
                f"group {group.name!r} has window={group.window}: a virtual span keeps every token; "
                "leave window=None while contexts stay within it, or use kvjax.init"
            )
        row = []
        for pool in canonical_layout(group, 1).pools:
            row.append(PoolPlace(pool, end))
            end = _round_up(end + len(group.layers) * pool.bytes_per_token, _ALIGNMENT)
        places.append(tuple(row))
    record = _round_up(end, _ALIGNMENT)
    page_bytes = _round_up(page_group_bytes, lcm(granularity, reads_at_once * record))
    tokens = page_bytes // record
    width = -(-max_context // tokens)
    return SpanLayout(
        spec=spec,
        places=tuple(places),
        record_bytes=record,
        page_tokens=tokens,
        page_bytes=page_bytes,
        width=width,
        # Two blocks at least: in a span of one, the only place to read a block from is known to the compiler, and with
        # it the read would no longer depend on the stores (see `VirtualCache.order`).
        span_pages=_round_up(max(width * tokens, 2 * block), lcm(tokens, block)) // tokens,
        rows=rows,
        max_context=max_context,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
