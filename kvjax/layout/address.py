"""Where one element of a layout stands, in plain Python: the reference that conversions and kernels are held to."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.layout.schema import Layout


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
      ValueError: a coordinate outside the layout, naming it.
    """
    name = {0: "k", 1: "v"}.get(kv, kv) if isinstance(kv, int) else kv
    array, tensor = layout.tensor(str(name))
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


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise SlotError(f"{name}={value!r} must be an integer") from error
    if isinstance(value, bool):
        raise SlotError(f"{name}={value!r} must be an integer, not a truth value")
    return number
