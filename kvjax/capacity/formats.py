"""Element formats of a cache, with everything they store beside the codes: scales, zero points, outliers, residuals.

A format says what one head's row of one token takes.  Where a scale is shared by several tokens its bytes are divided
among them; amounts are exact fractions, and whole bytes only once a page or a sequence is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Axis = Literal["lanes", "tokens", "token"]
"""What shares a scale: neighbouring lanes of a row, the same lane of neighbouring tokens, or all heads of a token."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Numbers stored beside the codes of a tensor.

    Attributes:
      axis: what shares one of them.
      group: elements that share one; for "lanes", 0 means the whole row.
      bytes: of one scale and its zero point, if it has one.
    """

    axis: Axis
    group: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Format:
    """How the elements of a cache are stored.

    Attributes:
      name: for flags and reports.
      bits: of one code.
      source: where the numbers come from.
      key_scales, value_scales: beside the codes; None: none, or one a tensor, which weighs nothing.
      residual: the last tokens of a sequence, kept in bfloat16 beside their codes.
      sinks: the first tokens, likewise.
      outliers: share of the elements that are stored again, exactly.
      outlier_bytes: of one of those, with its index.
      lossy: quality has to be evaluated before it is switched on.
    """

    name: str
    bits: int
    source: str
    key_scales: Scales | None = None
    value_scales: Scales | None = None
    residual: int = 0
    sinks: int = 0
    outliers: Fraction = Fraction(0)
    outlier_bytes: int = 0
    lossy: bool = True

    def row_bytes(self, width: int, *, heads: int = 1, values: bool = False) -> Fraction:
        """Bytes of one head's row of one token.

        Args:
          width: elements.
          heads: cached heads of the tensor, which share what is stored once a token.
          values: the row is of a value tensor; keys and latents are not.
        """
        codes = Fraction(-(-width * self.bits // 8))
        scales = self.value_scales if values else self.key_scales
        beside = Fraction(0)
        if scales is not None:
            if scales.axis == "lanes":
                beside = Fraction(scales.bytes * (-(-width // scales.group) if scales.group else 1))
            elif scales.axis == "tokens":
                beside = Fraction(scales.bytes * width, scales.group)
            else:
                beside = Fraction(scales.bytes, heads)
        return codes + beside + self.outliers * width * self.outlier_bytes

    def kept_exact(self, tokens: int) -> int:
        """Tokens of a sequence that are also held in bfloat16."""
        return min(tokens, self.residual + self.sinks)


def _kivi(bits: int) -> Format:
    pairs = 4  # a float16 scale and a float16 zero point
    return Format(
        f"kivi{bits}",
        bits,
        "KIVI: keys per channel over 32 tokens, values per token over 32 lanes, 128 tokens exact",
        key_scales=Scales("tokens", 32, pairs),
        value_scales=Scales("lanes", 32, pairs),
        residual=128,
    )


def _kvquant(bits: int) -> Format:
    return Format(
        f"kvquant{bits}",
        bits,
        "KVQuant nuq, 1 % outliers: keys calibrated offline, values one scale and offset a token, first token exact",
        value_scales=Scales("token", 0, 4),
        sinks=1,
        outliers=Fraction(1, 100),
        outlier_bytes=4,
    )


FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("fp32", 32, "IEEE single", lossy=False),
        Format("bf16", 16, "bfloat16", lossy=False),
        Format("fp16", 16, "IEEE half", lossy=False),
        Format("fp8", 8, "e4m3 or e5m2, one scale a tensor; latents and compressed entries in their packed rows"),
        Format("int8", 8, "one float32 scale a head and token", Scales("lanes", 0, 4), Scales("lanes", 0, 4)),
        Format("int4", 4, "float16 scale and zero a 32 lanes", Scales("lanes", 32, 4), Scales("lanes", 32, 4)),
        Format("mxfp4", 4, "one ue8m0 exponent a 32 lanes", Scales("lanes", 32, 1), Scales("lanes", 32, 1)),
        Format("nvfp4", 4, "one e4m3 scale a 16 lanes", Scales("lanes", 16, 1), Scales("lanes", 16, 1)),
        _kivi(4),
        _kivi(2),
        _kvquant(4),
        _kvquant(3),
        _kvquant(2),
    )
}
"""By name."""

WEIGHT_BITS: Mapping[str, Fraction] = {
    "fp32": Fraction(32),
    "bf16": Fraction(16),
    "fp16": Fraction(16),
    "fp8": Fraction(8),
    "int8": Fraction(8),
    "int4": Fraction(4) + Fraction(16, 128),  # a float16 scale for 128 weights
    "mxfp4": Fraction(4) + Fraction(8, 32),  # a shared exponent for 32 weights
    "nvfp4": Fraction(4) + Fraction(8, 16),  # an e4m3 scale for 16 weights
}
"""Bits a weight, scales included."""


def format_named(name: str) -> Format:
    """A format by name; ValueError lists what there is."""
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def weight_bytes(parameters: int, name: str) -> int:
    """Bytes of `parameters` weights in a format; ValueError lists what there is."""
    if name not in WEIGHT_BITS:
        raise ValueError(f"weight format {name!r} is not known; known: {', '.join(WEIGHT_BITS)}")
    return math.ceil(parameters * WEIGHT_BITS[name] / 8)
