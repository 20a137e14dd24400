"""The typed description of what each kind of layer caches.

A group is a set of layers that cache the same tensors and keep them equally long.  A layer may be in several groups:
DeepSeek-V4's layers keep a window of raw entries, closed compressed entries and the tail of an open window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvjax.architecture.fields import FieldUse


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """What one layer keeps for every entry (for every token, unless its group compresses).

    Attributes:
      name: "k", "v", "latent", "indexer_key", …
      heads: cached heads.
      width: elements a head and entry.
      sharded: tensor parallelism splits the heads; otherwise every device holds the whole tensor.
      packed: bytes of an entry in formats that mix element types, by format; these replace heads · width · bytes.
      format: the format it is kept in whatever the cache's format is; None follows the cache.
    """

    name: str
    heads: int
    width: int
    sharded: bool = True
    packed: Mapping[str, int] = field(default_factory=dict)
    format: str | None = None


@dataclass(frozen=True, slots=True)
class StateTensor:
    """What one layer keeps for a sequence, however long it is.

    Attributes:
      name: "recurrent", "convolution", …
      shape: its shape for one sequence.
      dtype: numpy or jax dtype name.
      heads: how many ways tensor parallelism can split it; 1 means that every device holds the whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    heads: int = 1

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that cache the same tensors for the same time.

    Attributes:
      name: unique within an architecture.
      mechanism: for people: "full attention", "sliding window", "latent attention", …
      layers: model layers, from 0.
      tensors: kept for each entry.
      states: kept for each sequence.
      window: entries of the last `window` tokens are kept; None keeps all.
      chunked: the window does not slide; it empties at every multiple of `window`.
      tokens_per_entry: tokens an entry stands for; an entry is kept once all of them are computed.
      resident: the window is a ring that a sequence holds whole from its first token, and so is part of its state.
    """

    name: str
    mechanism: str
    layers: tuple[int, ...]
    tensors: tuple[CachedTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()
    window: int | None = None
    chunked: bool = False
    tokens_per_entry: int = 1
    resident: bool = False

    @property
    def paged(self) -> bool:
        """Its entries live in pages that a sequence takes as it grows."""
        return bool(self.tensors) and not self.resident


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as far as its cache and its memory are concerned.

    Attributes:
      model_type: Hugging Face's name of the family.
      num_layers: decoder layers.
      query_heads: attention heads; 0 without attention.
      hidden_size: elements of a hidden state.
      groups: what the layers cache.  Layers in no group cache nothing.
      max_context: positions the model was made for; None if the config does not say.
      vocabulary: token ids; None if the config does not say.
      mlp_width: elements inside the widest MLP that one token passes; None if the config does not say.
      parameters: number of weights; None where this package cannot count them.
      parameters_note: how they were counted, or why they were not.
      kv_format: the format the publisher keeps the cache in.
      uses: which field was used for what.
    """

    model_type: str
    num_layers: int
    query_heads: int
    hidden_size: int
    groups: tuple[CacheGroup, ...]
    max_context: int | None = None
    vocabulary: int | None = None
    mlp_width: int | None = None
    parameters: int | None = None
    parameters_note: str = ""
    kv_format: str = "bf16"
    uses: tuple[FieldUse, ...] = ()

    def group(self, name: str) -> CacheGroup:
        """The group called `name`; ValueError if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ValueError(f"{self.model_type} has groups {[group.name for group in self.groups]}, not {name!r}")
