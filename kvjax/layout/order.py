"""The order of an array, written as a pattern over named axes.

    (layer page) head token lane               one axis that merges two; the rest one each
    layer page head lane/8 token lane%8        lanes cut in vectors of 8, tokens between the vectors

An axis stands whole (`head`), or cut in two: `head/4` (which group of four) and, anywhere after it, `head%4` (which of
the four).  A cut that does not divide leaves padding.  `()` is an axis of length 1.  Within a merged axis, layer comes
before page and page before everything that lies inside a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

AXES = ("layer", "page", "kv", "token", "head", "lane")
"""The axes, in the order in which a page is taken apart: kv tells K from V, lane is the place in a head's vector."""

_FACTOR = re.compile(r"([a-z]+)(?:([/%])(\d+))?")


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a logical axis: a coordinate c stands at index c // stride % size.

    Attributes:
      axis: one of `AXES`.
      size: indices there are.
      stride: coordinates that share an index.
    """

    axis: str
    size: int
    stride: int = 1


Dims = tuple[tuple[Factor, ...], ...]
"""The factors of each axis of an array, outermost first."""


@lru_cache(maxsize=512)
def parse_order(order: str, extents: tuple[int, ...]) -> Dims:
    """The factors that a pattern names, for axes of these extents (in the order of `AXES`).

    Raises:
      ValueError: a pattern that names an axis never, twice or in pieces that do not fit; says which.
    """
    sizes = dict(zip(AXES, extents, strict=True))
    words = re.findall(r"\([^()]*\)|[^\s()]+", order)
    dims = tuple(tuple(_factor(word, sizes, order) for word in text.strip("()").split()) for text in words)
    for axis, extent in sizes.items():
        parts = [factor for dim in dims for factor in dim if factor.axis == axis]
        if not parts and extent == 1 and axis in ("kv", "layer"):
            continue
        strides = [factor.stride for factor in parts]
        whole = strides == [1] and parts[0].size == extent
        cut = len(parts) == 2 and strides == [parts[1].size, 1] and axis not in ("layer", "page")
        if not (whole or cut):
            allowed = "" if axis in ("layer", "page") else f", or cut it as {axis}/n … {axis}%n"
            raise ValueError(f"{order=} must name {axis} once{allowed}")
    for dim in dims:
        ranks = [{"layer": 0, "page": 1}.get(factor.axis, 2) for factor in dim]
        if ranks != sorted(ranks):
            raise ValueError(f"{order=}: in a merged axis layer comes first, then page, then what lies in a page")
    return dims


def _factor(word: str, sizes: dict[str, int], order: str) -> Factor:
    match = _FACTOR.fullmatch(word)
    if match is None or match[1] not in sizes or match[3] == "0":
        raise ValueError(f"{order=} has {word!r}; write axis, axis/n or axis%n, with an axis of {AXES}")
    axis, kind, number = match[1], match[2], int(match[3] or 1)
    if kind == "/":
        return Factor(axis, -(-sizes[axis] // number), number)
    return Factor(axis, number if kind == "%" else sizes[axis])
