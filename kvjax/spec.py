"""What a model caches: named tensors, grouped by the layers that cache the same kind of thing.

Plain Python, no arrays.  A `CacheSpec` is all that the rest of kvjax needs to know about a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

import numpy as np
from jax import dtypes

from kvjax.architecture import read_architecture
from kvjax.architecture.fields import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor that a layer caches for every token.

    Attributes:
      name: the keyword by which `kvjax.write` receives it ("k", "v", …).
      heads: number of cached heads (KV heads).
      width: elements a head and token.
      dtype: a dtype name numpy or jax knows ("float32", "bfloat16", …).
    """

    name: str
    heads: int
    width: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or iskeyword(self.name) or self.name in ("cache", "layer", "grant", "scales"):
            raise ValueError(f"TensorSpec name={self.name!r} cannot be a keyword of kvjax.write; choose another")
        for field in ("heads", "width"):
            _require_positive(f"TensorSpec({self.name!r}).{field}", getattr(self, field))
        object.__setattr__(self, "dtype", _real_dtype(self.name, self.dtype).name)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token of one layer needs, without padding."""
        return self.heads * self.width * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The layers that cache the same tensors with the same geometry, and so share one page table.

    Attributes:
      name: unique within the spec.
      layers: model layer indices, in the order their pages are stored.
      tensors: what each of these layers caches.  "k" and "v" with equal heads and dtype share one array (see `layout`).
      window: a token attends to the last `window` positions including itself; None attends to all.
    """

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 0 or len(set(self.layers)) != len(self.layers):
            raise ValueError(f"GroupSpec({self.name!r}) layers={self.layers} must be distinct, ≥ 0 and not empty")
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"GroupSpec({self.name!r}) needs tensors with distinct names, got {names}")
        if self.window is not None:
            _require_positive(f"GroupSpec({self.name!r}).window", self.window)

    def tensor(self, name: str) -> TensorSpec:
        """The tensor called `name`; ValueError if the group has none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise ValueError(f"group {self.name!r} caches {[t.name for t in self.tensors]}, not {name!r}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token needs over all layers of the group, without padding."""
        return len(self.layers) * sum(tensor.bytes_per_token for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A model's groups; a uniform model has one.  Every layer 0 … num_layers−1 belongs to exactly one."""

    groups: tuple[GroupSpec, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("CacheSpec needs at least one group")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"CacheSpec group names must differ, got {names}")
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))):
            raise ValueError(f"CacheSpec layers must be 0…{len(layers) - 1}, each in one group; got {layers}")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token needs over all groups, without padding."""
        return sum(group.bytes_per_token for group in self.groups)

    def locate(self, layer: int) -> tuple[int, int]:
        """(group index, layer's index within that group) of a model layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise ValueError(f"{layer=} is not in this cache; it has layers 0…{self.num_layers - 1}")

    @classmethod
    def join(cls, parts: Mapping[str, CacheSpec]) -> CacheSpec:
        """Several models' caches as one: a token has a place in all of them, or in none.

        Groups are called "part.group", and layers are counted on from one part to the next.  `part` is the inverse.
        """
        groups, start = [], 0
        for name, spec in parts.items():
            for group in spec.groups:
                layers = tuple(start + layer for layer in group.layers)
                groups.append(replace(group, name=f"{name}.{group.name}", layers=layers))
            start += spec.num_layers
        return cls(tuple(groups))

    def part(self, name: str) -> tuple[CacheSpec, tuple[int, ...]]:
        """What was joined under `name`, and the indices of its groups; ValueError if nothing was."""
        indices = tuple(i for i, group in enumerate(self.groups) if group.name.startswith(f"{name}."))
        if not indices:
            raise ValueError(f"no part {name!r} was joined; the groups are {[group.name for group in self.groups]}")
        groups = [self.groups[index] for index in indices]
        start = min(layer for group in groups for layer in group.layers)
        own = [
            replace(group, name=group.name.removeprefix(f"{name}."), layers=tuple(one - start for one in group.layers))
            for group in groups
        ]
        return CacheSpec(tuple(own)), indices

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: str = "bfloat16",
        window: int | None = None,
    ) -> CacheSpec:
        """`layers` equal attention layers: MHA, GQA or MQA by `kv_heads`; `value_dim` defaults to `head_dim`."""
        _require_positive("layers", layers)
        if layers > MAX_LAYERS:
            raise ValueError(f"{layers=} must be at most {MAX_LAYERS}")
        tensors = (
            TensorSpec("k", kv_heads, head_dim, dtype),
            TensorSpec("v", kv_heads, head_dim if value_dim is None else value_dim, dtype),
        )
        return cls((GroupSpec("attention", tuple(range(layers)), tensors, window),))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dtype: str = "bfloat16") -> CacheSpec:
        """The spec of a Hugging Face `config.json`, given as a mapping.

        Knows the families whose layers all cache full-attention keys and values: llama, mistral, qwen2, qwen3.

        Raises:
          ValueError: an unknown `model_type`, a missing or non-positive field, sliding-window layers, or an unknown
            field that may change what is cached (`architecture.read_architecture`).
        """
        if config.get("model_type") not in FULL_ATTENTION_FAMILIES:
            known = ", ".join(FULL_ATTENTION_FAMILIES)
            raise ValueError(f"config model_type={config.get('model_type')!r} is not supported; known: {known}")
        architecture = read_architecture(config)
        stated = {use.field: use.value for use in architecture.uses}
        if stated.get("sliding_window") is not None and stated.get("use_sliding_window", True):
            raise ValueError(
                f"config sliding_window={stated['sliding_window']} is not supported; "
                "set it to null if contexts stay within it"
            )
        (group,) = architecture.groups
        keys, values = group.tensors
        return cls.uniform(
            layers=len(group.layers), kv_heads=keys.heads, head_dim=keys.width, value_dim=values.width, dtype=dtype
        )


FULL_ATTENTION_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def _real_dtype(tensor: str, dtype: Any) -> np.dtype:
    """The dtype as numpy knows it; ValueError unless jax would allocate just that, and it holds real numbers."""
    try:
        found = np.dtype(dtype) if dtype is not None else None
    except TypeError:
        found = None
    if found is None or not (dtypes.issubdtype(found, np.floating) or dtypes.issubdtype(found, np.integer)):
        raise ValueError(f"TensorSpec({tensor!r}) dtype={dtype!r} is no real dtype that jax knows")
    if dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"TensorSpec({tensor!r}) dtype={dtype!r} needs jax_enable_x64; use a 32-bit dtype")
    return found


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{name}={value!r} must be a positive integer below 2**31")
