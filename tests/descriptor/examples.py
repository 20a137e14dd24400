"""A descriptor with every part filled in, and every single change of one of its fields."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from kvjax.descriptor import (
    Adapter,
    Descriptor,
    Media,
    Model,
    Positions,
    Quantisation,
    Rope,
    Text,
    Tokens,
    text_digest,
    tokens_of,
)
from kvjax.layout import Shard, canonical_layout
from kvjax.spec import CacheSpec, GroupSpec, TensorSpec

FULL = GroupSpec("full", (0, 2), (TensorSpec("k", 2, 8, "int8"), TensorSpec("v", 2, 8), TensorSpec("k_scale", 2, 1)))
LOCAL = GroupSpec("local", (1,), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), window=32)

EXAMPLE = Descriptor(
    tokens=(tokens_of([5, 6, 7]), tokens_of([])),
    model=Model("llama-3-8b", text_digest("weights")),
    text=Text(text_digest("tokenizer"), text_digest("template")),
    adapter=Adapter("lora", text_digest("adapter")),
    media=(Media(text_digest("image"), 1, 2),),
    rope=Rope("llama3", 500000, 8, False, (("factor", 8.0), ("low", 1.0))),
    positions=Positions("rotated"),
    spec=CacheSpec((FULL, LOCAL)),
    pages=(canonical_layout(FULL, 16), canonical_layout(LOCAL, 8)),
    shards=(Shard("head", "tensor", 2),),
    quantisation=(Quantisation("k", "int8", "token", 16, "k_scale", "bfloat16", True, "write", 0, "float32", None),),
    tenant="somebody",
)

# Where any text or number will not do: another valid value.
OTHER = {
    "keys": "unrotated",
    "counted": "in_cache",
    "axis": "lane",
    "update_time": "calibration",
    "byte_order": "big",
    "dtype": "float16",
    "constants": "a table",
    "window": 64,
}


def single_changes(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path of the field, the value with only that leaf changed) for every leaf of a dataclass or tuple."""
    found = []
    if is_dataclass(value):
        for field in fields(value):
            within = f"{path}.{field.name}" if path else field.name
            for place, changed in single_changes(getattr(value, field.name), within):
                found.append((place, _replaced(value, field.name, changed)))
        return found
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            for place, changed in single_changes(item, f"{path}[{index}]"):
                found.append((place, (*value[:index], changed, *value[index + 1 :])))
        return found
    name = path.split(".")[-1].split("[")[0]
    if value is None and name not in OTHER:  # an absent part; see `ABSENT`
        return []
    return [(path, OTHER.get(name, _other(value)))]


def _other(value: Any) -> Any:
    if value is None:
        return None
    return not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1


def _replaced(value: Any, field: str, changed: Any) -> Any:
    """A dataclass with one field replaced, past the checks that no single change of a spec could pass."""
    try:
        return replace(value, **{field: changed})
    except ValueError:
        copy = object.__new__(type(value))
        for one in fields(value):
            object.__setattr__(copy, one.name, changed if one.name == field else getattr(value, one.name))
        return copy


ABSENT = {
    "tokens": (),
    "text": None,
    "adapter": None,
    "media": (),
    "rope": None,
    "pages": (),
    "shards": (),
    "quantisation": (),
    "text.template": None,
    "quantisation[0].scale": None,
}
"""Parts that may be absent."""


def without(descriptor: Descriptor, path: str) -> Descriptor:
    """The descriptor with a part of `ABSENT` taken out."""
    if path == "text.template":
        return replace(descriptor, text=replace(descriptor.text, template=None))
    if path == "quantisation[0].scale":
        return replace(descriptor, quantisation=(replace(descriptor.quantisation[0], scale=None),))
    return replace(descriptor, **{path: ABSENT[path]})


__all__ = ["ABSENT", "EXAMPLE", "Tokens", "single_changes", "without"]
