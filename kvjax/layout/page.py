"""Where a group's tensors stand inside a page.  Plain Python, no arrays.

The canonical page of a K/V group is `(head, token, kv, dim)`: head-major, with K and V of one token side by side in the
last axis.  One copy then fetches K and V of a page for all heads; sharding over heads keeps pairs together; and a
head_dim of 64 fills 128 lanes without padding.  Token-major pages need a sublane shuffle a head on TPU: for the same
arithmetic (8 heads × 128, 16 tokens) the v6e compiler gives 4292 instruction bundles, and 797 for head-major pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.spec import GroupSpec

TPU_LANES = 128


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One array of a group: `[layers · pages, heads, page_size, lanes]`, holding tensors at fixed lanes.

    Attributes:
      name: the pool's name; the names of its tensors joined ("kv", …).
      heads: heads of every tensor in it.
      lanes: length of the last axis, padding included.
      dtype: dtype name.
      slices: (tensor name, first lane, end lane) of each tensor.
    """

    name: str
    heads: int
    lanes: int
    dtype: str
    slices: tuple[tuple[str, int, int], ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token of one layer takes, padding lanes included."""
        return self.heads * self.lanes * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The pools of one group and the page size they share.

    Attributes:
      page_size: token positions a page.
      pools: the arrays of the group.
    """

    page_size: int
    pools: tuple[PoolLayout, ...]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of one layer over all pools."""
        return self.page_size * sum(pool.bytes_per_token for pool in self.pools)


def canonical_layout(group: GroupSpec, page_size: int, *, lane_multiple: int = 1) -> PageLayout:
    """The canonical layout of a group: "k" and "v" share one pool if heads and dtype agree, other tensors stand alone.

    Args:
      group: the group.
      page_size: token positions a page, at least 1.
      lane_multiple: the last axis is rounded up to a multiple of it: 1 on CPU and GPU, `TPU_LANES` on TPU, where any
        other width makes the compiler copy the pool into a padded one.
    """
    if page_size < 1 or lane_multiple < 1:
        raise ValueError(f"{page_size=} and {lane_multiple=} must be at least 1")
    names = {tensor.name: tensor for tensor in group.tensors}
    paired = (
        "k" in names and "v" in names and (names["k"].heads, names["k"].dtype) == (names["v"].heads, names["v"].dtype)
    )
    bundles = [[names["k"], names["v"]]] if paired else []
    bundles += [[tensor] for tensor in group.tensors if not (paired and tensor.name in ("k", "v"))]
    if paired and "kv" in names:
        raise ValueError(f"group {group.name!r} has tensors k, v and kv; the pool of k and v is called kv: rename one")
    pools = []
    for bundle in bundles:
        end, slices = 0, []
        for tensor in bundle:
            slices.append((tensor.name, end, end + tensor.width))
            end += tensor.width
        pools.append(
            PoolLayout(
                name="".join(tensor.name for tensor in bundle),
                heads=bundle[0].heads,
                lanes=-(-end // lane_multiple) * lane_multiple,
                dtype=bundle[0].dtype,
                slices=tuple(slices),
            )
        )
    return PageLayout(page_size, tuple(pools))
