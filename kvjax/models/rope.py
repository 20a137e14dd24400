"""Rotary position embeddings (Su et al. 2021) and the ways of stretching them that Hugging Face configs name.

The arithmetic follows transformers' `modeling_rope_utils.py` in float32, step by step: a frequency that differs in its
last bit turns into an angle that differs by position × 2⁻²⁴.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of a whole head: hashable, so that it can be part of a model's static structure.

    Attributes:
      frequencies: radians a position, one per pair of lanes (head_dim / 2 of them), as exact float32 values.
      magnitude: factor on cosines and sines (YaRN's attention factor); 1 elsewhere.
    """

    frequencies: tuple[float, ...] = field(repr=False)
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        odd = [value for value in (*self.frequencies, self.magnitude) if not math.isfinite(value)]
        if odd:
            raise ValueError(f"the rotary embedding turns by {odd[0]}; its fields must give finite frequencies")

    def angles(self, position: Int32[Array, " packed"]) -> tuple[Float32[Array, "packed 1 half"], ...]:
        """(cosines, sines) of each position, with an axis for the heads."""
        angle = position[:, None, None].astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)
        return jnp.cos(angle) * self.magnitude, jnp.sin(angle) * self.magnitude


def rotate(
    x: Float[Array, "packed heads dim"], angles: tuple[Float32[Array, "packed 1 half"], ...]
) -> Float[Array, "packed heads dim"]:
    """Turns lane i together with lane i + dim/2 (the order of Hugging Face checkpoints) by the position's angles."""
    cos, sin = angles
    low, high = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def rope_from_config(config: Mapping[str, Any], head_dim: int, max_context: int) -> Rope:
    """The rotary embedding of a Hugging Face config, given as a mapping.

    Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raises:
      ValueError: a missing or wrong field, or a variant whose keys would change as the context grows.
    """
    if head_dim % 2:
        raise ValueError(f"{head_dim=} must be even: rotary embeddings turn pairs of lanes")
    fields = _fields(config, max_context)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if not isinstance(kind, str) or kind not in VARIANTS:
        raise ValueError(
            f"config rope_type={kind!r} is not supported; known: {', '.join(VARIANTS)}. (dynamic and longrope change "
            "the rotation of keys that are cached already)"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config partial_rotary_factor={fields['partial_rotary_factor']} is not supported, only 1.0")
    theta = _number(fields, "rope_theta", default=10_000.0)
    if theta <= 1:
        raise ValueError(f"config rope_theta={theta} must be greater than 1: later lanes turn more slowly")
    lanes = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies, magnitude = VARIANTS[kind](np.float32(theta) ** lanes, fields)
    return Rope(tuple(frequencies.astype(np.float32).tolist()), magnitude)


def _fields(config: Mapping[str, Any], max_context: int) -> dict[str, Any]:
    """The rotary fields in one place, by the precedence of transformers' `RotaryEmbeddingConfigMixin`."""
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(fields, Mapping) or any(isinstance(value, Mapping) for value in fields.values()):
        raise ValueError(f"config rope_parameters={fields!r} must be one flat object, the same for every layer")
    inner = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    fields = {**{name: value for name, value in inner.items() if value is not None}, **fields}
    original = config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    return {**fields, "original_max_position_embeddings": original or max_context}


def _default(periods: np.ndarray, fields: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    return 1 / periods, 1.0


def _linear(periods: np.ndarray, fields: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    return 1 / periods / np.float32(_number(fields, "factor")), 1.0


def _llama3(periods: np.ndarray, fields: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""
    factor, original = _number(fields, "factor"), _number(fields, "original_max_position_embeddings")
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if high <= low:
        raise ValueError(f"config high_freq_factor={high} must be greater than low_freq_factor={low}")
    frequencies = 1 / periods
    turns = original / (np.float32(2 * math.pi) / frequencies)  # over the original context
    ramp = (turns - low) / (high - low)
    blended = (1 - ramp) * frequencies / factor + ramp * frequencies
    return np.where(turns < low, frequencies / factor, np.where(turns > high, frequencies, blended)), 1.0


def _yarn(periods: np.ndarray, fields: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, §3): stretches lanes by how often they turn over the original context."""
    factor, original = _number(fields, "factor"), _number(fields, "original_max_position_embeddings")
    theta, half = _number(fields, "rope_theta", default=10_000.0), len(periods)

    def lane(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = lane(_number(fields, "beta_fast", default=32.0))
    high = lane(_number(fields, "beta_slow", default=1.0))
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(half, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    frequencies = 1 / (factor * periods) * ramp + 1 / periods * (1 - ramp)
    return frequencies, _yarn_magnitude(factor, fields)


def _yarn_magnitude(factor: float, fields: Mapping[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is not None:
        return _number(fields, "attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return magnitude(_number(fields, "mscale")) / magnitude(_number(fields, "mscale_all_dim"))
    return magnitude(1.0)


VARIANTS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
"""rope_type → (θ^(2i/d) of each pair of lanes, config fields) → (frequencies, magnitude)."""

SMALLEST, LARGEST = 1e-9, 1e18
"""Of any number in a config's rotary fields.  Within, float32 arithmetic neither overflows nor divides by zero."""


def _number(fields: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = fields.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
        raise ValueError(
            f"config rope field {field!r} is {value!r}; it must be a number between {SMALLEST:g} and {LARGEST:g}"
        )
    return float(value)
