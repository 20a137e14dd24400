"""A slab, some pages of one layer: where it lies in an array, the tensors in it, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from kvjax.layout.order import AXES, Dims, Factor
from kvjax.layout.schema import ArrayLayout, Layout

Index = Int32[Array, ""]
Tensors = dict[str, Shaped[Array, "pages tokens heads width"]]


def box(dims: Dims, layer: Index, page: Index, count: int) -> tuple[list[Index], list[int]]:
    """Start and size, in an array, of `count` pages of a layer."""
    starts, sizes = [], []
    for dim in dims:
        start, size = jnp.int32(0), 1
        for factor in dim:
            index = {"layer": layer, "page": page}.get(factor.axis, 0)
            start = start * factor.size + index
            size = size * _size_in_slab(factor, count)
        starts.append(start)
        sizes.append(size)
    return starts, sizes


def _size_in_slab(factor: Factor, count: int) -> int:
    return {"layer": 1, "page": count}.get(factor.axis, factor.size)


def unpack(slab: Array, layout: Layout, array: ArrayLayout, count: int) -> Tensors:
    """The tensors in a slab of `count` pages."""
    factors = [factor for dim in layout.dims(array) for factor in dim]
    plain = slab.reshape([_size_in_slab(factor, count) for factor in factors]).transpose(_plain_order(factors))
    plain = plain.reshape(count, *_padded(factors))
    tokens = layout.extent(array, "token")
    return {
        tensor.name: plain[:, tensor.kv, :tokens, : tensor.heads, tensor.lane : tensor.lane + tensor.width]
        for tensor in array.tensors
    }


def pack(tensors: Tensors, layout: Layout, array: ArrayLayout, count: int) -> Array:
    """The inverse of `unpack`, in the order of the array's factors; padding is zero."""
    factors = [factor for dim in layout.dims(array) for factor in dim]
    order = _plain_order(factors)
    plain = jnp.zeros((count, *_padded(factors)), array.dtype)
    for tensor in array.tensors:
        start = (0, tensor.kv, 0, 0, tensor.lane)
        plain = lax.dynamic_update_slice(plain, tensors[tensor.name][:, None], start)
    plain = plain.reshape([_size_in_slab(factors[index], count) for index in order])
    return plain.transpose([order.index(index) for index in range(len(order))])


def _plain_order(factors: Sequence[Factor]) -> list[int]:
    """The places of the factors in the order of `AXES`, the outer part of a cut axis first."""
    return sorted(range(len(factors)), key=lambda index: (AXES.index(factors[index].axis), -factors[index].stride))


def _padded(factors: Sequence[Factor]) -> list[int]:
    """Sizes of (kv, token, head, lane), padding included."""
    return [math.prod(factor.size for factor in factors if factor.axis == axis) for axis in AXES[2:]]
