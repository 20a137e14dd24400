"""Families that cache keys and values: multi-head, grouped and multi-query attention, with or without windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from kvjax.architecture.description import Architecture, CachedTensor, CacheGroup
from kvjax.architecture.fields import ConfigError, Fields
from kvjax.architecture.weights import Counter, Shape, count
from kvjax.architecture.windows import Windows, no_windows

Default = Literal["required", "heads", "split"]
"""Where a field is missing: an error, the number of query heads, or hidden_size over heads."""


def attention_reader(
    *,
    windows: Callable[[Fields, int], Windows] = no_windows,
    chunked: bool = False,
    kv_heads: Default = "required",
    head_dim: Default = "split",
    defaults: Mapping[str, int] | None = None,
    counter: Counter | None = None,
    skip: tuple[str, ...] = (),
) -> Callable[[Fields], Architecture]:
    """A reader for one family.

    Args:
      windows: how its configs say which layers have a window.
      chunked: those windows are aligned chunks.
      kv_heads, head_dim: what a missing field means.
      defaults: numbers of fields that its published files leave out.
      counter: counts its weights.
      skip: its fields that look as if they changed the cache and do not.
    """

    def read(fields: Fields) -> Architecture:
        fields.assume(defaults or {})
        fields.skip(*skip)
        shape = attention_shape(fields, kv_heads=kv_heads, head_dim=head_dim)
        groups = attention_groups(shape, windows(fields, shape.layers), chunked=chunked)
        parameters, note = count(fields, shape, counter)
        return architecture(fields, shape, groups, parameters, note)

    return read


def attention_shape(
    fields: Fields,
    *,
    layers: int | None = None,
    kv_heads: Default = "required",
    head_dim: Default = "split",
) -> Shape:
    """Heads and widths of a family's attention; `layers` is the number of layers where another field says it."""
    query_heads = fields.integer("num_attention_heads", "query heads")
    hidden = fields.integer("hidden_size", "width of a hidden state")
    layers = fields.layers(layers)
    split = hidden // query_heads if hidden % query_heads == 0 else None
    defaults = {"required": None, "heads": query_heads, "split": split}
    shape = Shape(
        layers,
        hidden,
        query_heads,
        fields.integer("num_key_value_heads", "cached heads", defaults[kv_heads]),
        fields.integer("head_dim", "width of a cached head", defaults[head_dim]),
    )
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            "num_key_value_heads", f"config: heads={shape.heads} must be a multiple of kv_heads={shape.kv_heads}"
        )
    return shape


def attention_groups(
    shape: Shape, windows: Windows, *, chunked: bool = False, layers: tuple[int, ...] | None = None
) -> tuple[CacheGroup, ...]:
    """One group of all layers with the same window; `layers` are the model layers that `windows` speaks of."""
    layers = tuple(range(len(windows))) if layers is None else layers
    tensors = key_value(shape.kv_heads, shape.head_dim)
    groups = []
    for window in dict.fromkeys(windows):
        mine = tuple(layer for layer, one in zip(layers, windows, strict=True) if one == window)
        if window is None:
            groups.append(CacheGroup("full", "full attention", mine, tensors))
        else:
            name, mechanism = ("chunk", "chunked attention") if chunked else ("window", "sliding window")
            groups.append(CacheGroup(name, mechanism, mine, tensors, window=window, chunked=chunked))
    return tuple(groups)


def key_value(heads: int, width: int) -> tuple[CachedTensor, CachedTensor]:
    """Keys and values of equal width."""
    return CachedTensor("k", heads, width), CachedTensor("v", heads, width)


def architecture(
    fields: Fields,
    shape: Shape,
    groups: tuple[CacheGroup, ...],
    parameters: int | None,
    note: str,
    kv_format: str = "bf16",
) -> Architecture:
    """The result of a reader, with the fields that all families share."""
    context = "model_max_length" if fields.has("model_max_length") else "max_position_embeddings"
    fields.skip("model_max_length", "max_position_embeddings")
    mlp = next((field for field in ("intermediate_size", "ffn_dim") if fields.has(field)), None)
    return Architecture(
        model_type=fields.family,
        num_layers=shape.layers,
        query_heads=shape.heads,
        hidden_size=shape.hidden,
        groups=groups,
        max_context=fields.optional(context, "longest context"),
        vocabulary=fields.optional("vocab_size", "size of the logits"),
        mlp_width=fields.optional(mlp, "width of an MLP's activations") if mlp else None,
        parameters=parameters,
        parameters_note=note,
        kv_format=kv_format,
    )
