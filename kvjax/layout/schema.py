"""The schema of a layout: which arrays hold a cache, what stands where in them, and how they are spread.

A layout is plain text and integers.  The order of an array's axes is a pattern, see `kvjax.layout.order`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from kvjax.layout.order import AXES, Dims, parse_order


@dataclass(frozen=True, slots=True)
class Scales:
    """What a tensor of quantisation scales (or zero points) belongs to.

    Attributes:
      of: name of the tensor it scales.
      axis: "lane": one entry for `group` lanes of one token; "token": one for `group` tokens of one lane.
      group: values that share an entry.
    """

    of: str
    axis: Literal["lane", "token"]
    group: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor stands in its array.

    Attributes:
      name: "k", "v", …
      heads: heads it has; the array may have more (padding).
      width: elements a head and token.
      kv: its index on the kv axis.
      lane: its first lane.
      scales: what it scales, if it holds scales.
    """

    name: str
    heads: int
    width: int
    kv: int = 0
    lane: int = 0
    scales: Scales | None = None

    @property
    def tokens_per_entry(self) -> int:
        """Tokens that share an entry: the group of scales taken along tokens, otherwise 1."""
        return self.scales.group if self.scales is not None and self.scales.axis == "token" else 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A logical axis split over a mesh axis, each device holding `1 / count` of it in one piece.

    Attributes:
      axis: "layer", "page" or "head".
      mesh_axis: the mesh axis.
      count: devices along it.
    """

    axis: Literal["layer", "page", "head"]
    mesh_axis: str
    count: int


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array: its order and the tensors in it.

    Attributes:
      name: the key under which a pool holds it.
      order: of its axes, a pattern of `kvjax.layout.order`.
      tensors: the tensors it holds; they have as many heads each.
      dtype: dtype name.
      lanes: length of the lane axis, padding included.
      kvs: length of the kv axis; 1 where the pattern has none.
    """

    name: str
    order: str
    tensors: tuple[TensorPlace, ...]
    dtype: str
    lanes: int
    kvs: int = 1

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def heads(self) -> int:
        return self.tensors[0].heads

    @property
    def tokens_per_entry(self) -> int:
        return self.tensors[0].tokens_per_entry


@dataclass(frozen=True)
class Layout:
    """A pool's arrays, the sizes they share, and how they are spread.

    A pool in this layout is a mapping from array names to arrays of `shape(array)`.  Offsets are logical and row-major:
    how a compiler tiles an array in memory is its own business.

    Attributes:
      name: what messages call it.
      layers, num_pages, page_size: the sizes.
      arrays: the arrays.
      shards: the axes that are split over a mesh.
      byte_order: of every element; arrays on a device are little-endian.
    """

    name: str
    layers: int
    num_pages: int
    page_size: int
    arrays: tuple[ArrayLayout, ...]
    shards: tuple[Shard, ...] = ()
    byte_order: Literal["little", "big"] = "little"

    def __post_init__(self) -> None:
        for size in ("layers", "num_pages", "page_size"):
            if getattr(self, size) < 1:
                raise ValueError(f"layout {self.name!r}: {size}={getattr(self, size)} must be at least 1")
        if self.byte_order not in ("little", "big"):
            raise ValueError(f"layout {self.name!r}: byte_order={self.byte_order!r} must be 'little' or 'big'")
        names = [tensor.name for array in self.arrays for tensor in array.tensors]
        if not names or len(set(names)) != len(names) or len({array.name for array in self.arrays}) != len(self.arrays):
            raise ValueError(f"layout {self.name!r} must hold tensors and arrays of distinct names, got {names}")
        for array in self.arrays:
            _check_array(self, array)
            self.dims(array)
        for shard in self.shards:
            self._check_shard(shard)

    def tensor(self, name: str) -> tuple[ArrayLayout, TensorPlace]:
        """The array that holds a tensor, and where; ValueError if none does."""
        for array in self.arrays:
            for tensor in array.tensors:
                if tensor.name == name:
                    return array, tensor
        raise ValueError(f"layout {self.name!r} holds {self.tensor_names}, not {name!r}")

    @property
    def tensor_names(self) -> list[str]:
        return [tensor.name for array in self.arrays for tensor in array.tensors]

    def extent(self, array: ArrayLayout, axis: str) -> int:
        """Coordinates of an axis in an array, without what a cut pads."""
        return {
            "layer": self.layers,
            "page": self.num_pages,
            "kv": array.kvs,
            "token": self.page_size // array.tokens_per_entry,
            "head": array.heads,
            "lane": array.lanes,
        }[axis]

    def dims(self, array: ArrayLayout) -> Dims:
        """The factors of each axis of an array, outermost first."""
        return parse_order(array.order, tuple(self.extent(array, axis) for axis in AXES))

    def shape(self, array: ArrayLayout) -> tuple[int, ...]:
        """Shape of an array, all its shards together."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims(array))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all arrays, padding included."""
        return sum(math.prod(self.shape(array)) * array.itemsize for array in self.arrays)

    @cached_property
    def local(self) -> Layout:
        """The layout of one shard; itself where nothing is split."""
        if not self.shards:
            return self
        count = {axis: math.prod(s.count for s in self.shards if s.axis == axis) for axis in ("layer", "page", "head")}
        arrays = tuple(
            replace(array, tensors=tuple(replace(t, heads=t.heads // count["head"]) for t in array.tensors))
            for array in self.arrays
        )
        layers, num_pages = self.layers // count["layer"], self.num_pages // count["page"]
        return replace(self, layers=layers, num_pages=num_pages, arrays=arrays, shards=())

    def partition(self, array: ArrayLayout) -> tuple[str | None, ...]:
        """The mesh axis each axis of an array is split over: the arguments of a `jax.sharding.PartitionSpec`."""
        split: dict[str, str] = {shard.axis: shard.mesh_axis for shard in self.shards}
        places = []
        for dim in self.dims(array):
            # An axis that is cut in two is split at its outer part, which stands first.
            places.append(split.pop(dim[0].axis, None) if dim else None)
            for factor in dim:
                split.pop(factor.axis, None)
        return tuple(places)

    def _check_shard(self, shard: Shard) -> None:
        if shard.axis not in ("layer", "page", "head") or shard.count < 1:
            raise ValueError(f"layout {self.name!r}: {shard} must split layer, page or head over at least 1 device")
        if sum(other.axis == shard.axis for other in self.shards) > 1:
            raise ValueError(f"layout {self.name!r} splits {shard.axis} twice; use one mesh axis for it")
        for array in self.arrays:
            extent = self.extent(array, shard.axis)
            if extent % shard.count:
                raise ValueError(
                    f"layout {self.name!r}: {extent} {shard.axis}s of array {array.name!r} do not split over "
                    f"{shard.count}"
                )
            outer = next(factor for dim in self.dims(array) for factor in dim if factor.axis == shard.axis)
            leads = shard.mesh_axis in self.partition(array)
            if not leads or outer.size % shard.count or extent // shard.count % outer.stride:
                raise ValueError(
                    f"layout {self.name!r}: the {shard.axis}s of array {array.name!r} ({array.order}) cannot be split "
                    f"over {shard.count} in whole pieces of one axis; split another axis, or use another layout"
                )


def _check_array(layout: Layout, array: ArrayLayout) -> None:
    where = f"layout {layout.name!r}, array {array.name!r}"
    for tensor in array.tensors:
        if tensor.heads != array.heads or tensor.tokens_per_entry != array.tokens_per_entry:
            raise ValueError(f"{where}: tensors of one array must have the same heads and token group")
        if not (0 <= tensor.kv < array.kvs and tensor.lane >= 0 and tensor.lane + tensor.width <= array.lanes):
            raise ValueError(f"{where}: {tensor} lies outside its {array.kvs} kv × {array.lanes} lanes")
    if layout.page_size % array.tokens_per_entry:
        raise ValueError(f"{where}: {array.tokens_per_entry} tokens a scale do not divide {layout.page_size=}")
    spans = sorted((tensor.kv, tensor.lane, tensor.lane + tensor.width) for tensor in array.tensors)
    for (kv, _, end), (next_kv, start, _) in pairwise(spans):
        if kv == next_kv and start < end:
            raise ValueError(f"{where}: two tensors share lanes {start}…{end - 1}")
