"""Where one element of a layout stands, in plain Python: the reference that conversions and kernels are held to."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvjax.layout.schema import ArrayLayout, Layout, TensorPlace


class SlotError(IndexError, ValueError):
    """A position that has no slot, or arguments that cannot name one."""


@dataclass(frozen=True, slots=True)
class Address:
    """The place of one element.

    Attributes:
      array: name of the array.
      shard: the device along each of the layout's shards, in their order; empty where nothing is split.
      element: row-major offset within that shard of the array, in elements.
      byte: the same in bytes.
    """

    array: str
    shard: tuple[int, ...]
    element: int
    byte: int


def address(layout: Layout, layer: int, kv: int | str, head: int, token: int, lane: int) -> Address:
    """Where an element stands.

    Args:
      layout: the layout.
      layer: layer within the group.
      kv: the tensor: its name, or 0 for "k" and 1 for "v".
      head: head of the tensor.
      token: slot, page · page_size + offset in the page (see `physical_slot`).
      lane: element within the head's vector.

    Raises:
      ValueError: a coordinate outside the layout, or one that is no integer, naming it.
    """
    array, tensor = _tensor(layout, kv)
    # As Python's own integers: numpy's would overflow in large pools.
    layer, head = _integer("layer", layer), _integer("head", head)
    token, lane = _integer("token", token), _integer("lane", lane)
    limits = {
        "layer": (layer, layout.layers),
        "head": (head, tensor.heads),
        "token": (token, layout.num_pages * layout.page_size),
        "lane": (lane, tensor.width),
    }
    for axis, (value, limit) in limits.items():
        if not 0 <= value < limit:
            raise ValueError(f"{axis}={value} is outside layout {layout.name!r}; it has 0…{limit - 1}")
    page, offset = divmod(token, layout.page_size)
    place = {
        "layer": layer,
        "page": page,
        "kv": tensor.kv,
        "token": offset // array.tokens_per_entry,
        "head": head,
        "lane": tensor.lane + lane,
    }
    shard = []
    for split in layout.shards:
        device, place[split.axis] = divmod(place[split.axis], layout.extent(array, split.axis) // split.count)
        shard.append(device)
    local = layout.local
    element = 0
    for factor in (factor for dim in local.dims(local.tensor(tensor.name)[0]) for factor in dim):
        element = element * factor.size + place[factor.axis] // factor.stride % factor.size
    return Address(array.name, tuple(shard), element, element * array.itemsize)


def view(layout: Layout, pool: Mapping[str, np.ndarray], layer: int, kv: int | str) -> np.ndarray:
    """One tensor of one layer in plain order, read from where `address` says; a copy, for references and debugging.

    Args:
      layout: the layout.
      pool: the arrays by name, of the layout's shapes, on the host and with all their shards together.
      layer, kv: as for `address`.

    Returns:
      `[tokens, heads, width]`, one row for each slot; scales along tokens stand at each of their tokens.

    Raises:
      ValueError: a layer or tensor outside the layout, or an array of another shape.
    """
    whole = replace(layout, shards=())
    array, tensor = _tensor(whole, kv)
    values, shape = pool[array.name], whole.shape(array)
    if values.shape != shape:
        raise ValueError(f"array {array.name!r} has shape {values.shape}; layout {layout.name!r} has {shape}")
    # Every factor of an order belongs to one axis, so an offset is a sum of offsets along the axes.
    origin = address(whole, layer, kv, 0, 0, 0).element
    tokens = [address(whole, layer, kv, 0, token, 0).element for token in range(whole.num_pages * whole.page_size)]
    heads = [address(whole, layer, kv, head, 0, 0).element - origin for head in range(tensor.heads)]
    lanes = [address(whole, layer, kv, 0, 0, lane).element - origin for lane in range(tensor.width)]
    return values.reshape(-1)[np.array(tokens)[:, None, None] + np.array(heads)[:, None] + np.array(lanes)]


def physical_slot(pages: Sequence[int], page_size: int, position: int) -> int:
    """The slot that holds a row's token: pages[position // page_size] · page_size + position % page_size.

    Args:
      pages: the row's physical pages, in order.
      page_size: token positions a page.
      position: position in the row.

    Raises:
      SlotError: a position that is negative or lies beyond the mapped pages, a page that is no page, or a page size
        below 1.  (It is an IndexError and a ValueError.)
    """
    page_size, position = _integer("page_size", page_size), _integer("position", position)
    if page_size < 1:
        raise SlotError(f"page_size={page_size} must be at least 1")
    mapped = len(pages) * page_size
    if not 0 <= position < mapped:
        raise SlotError(
            f"position={position} has no slot: {len(pages)} pages of {page_size} hold positions 0…{mapped - 1}; "
            "reserve it first"
        )
    logical = position // page_size
    page = _integer(f"pages[{logical}]", pages[logical])
    if page < 0:
        raise SlotError(f"pages[{logical}]={page} is no page; ids are at least 0")
    return page * page_size + position % page_size


def _tensor(layout: Layout, kv: int | str) -> tuple[ArrayLayout, TensorPlace]:
    """The tensor called `kv`, or "k" for 0 and "v" for 1."""
    name = kv if isinstance(kv, str) else {0: "k", 1: "v"}.get(_integer("kv", kv), str(kv))
    return layout.tensor(name)


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise SlotError(f"{name}={value!r} must be an integer") from error
    if isinstance(value, bool):
        raise SlotError(f"{name}={value!r} must be an integer, not a truth value")
    return number
