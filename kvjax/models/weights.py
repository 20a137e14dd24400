"""Fills a model's parameters from a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from kvjax.models.config import LlamaConfig
from kvjax.models.errors import ModelError
from kvjax.models.llama import abstract_llama

UNUSED = (".rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints hold and that the config already says."""


@runtime_checkable
class Checkpoint(Protocol):
    """Named tensors, in Hugging Face's order of axes ([out, in]) and rows.

    Attributes:
      path: the file or directory, for messages.
      shapes: shape of every tensor, by the file's own names; known before any is read.
    """

    @property
    def path(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def own_name(self, name: str) -> str:
        """What the file calls the tensor that Hugging Face checkpoints call `name`."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, by the file's own name."""
        ...


def load_parameters(config: LlamaConfig, dtype: str, checkpoint: Checkpoint) -> PyTree[Array]:
    """The weights of `LlamaModel(config, dtype, …)`.  Every name and shape is checked before the first is read.

    Raises:
      ModelError: a tensor is missing, has another shape than the config asks, or has no place in the model.
    """
    _, state = nnx.split(abstract_llama(config, dtype))
    leaves = [(tuple(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(state)]
    expected = {n: s for path, leaf in leaves for n, s in _tensors(path, leaf.shape, config.layers)}
    _check(checkpoint, {checkpoint.own_name(name): shape for name, shape in expected.items()}, config)

    def load(path: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        tensors = _tensors(path, shape, config.layers)
        stack = np.empty((len(tensors), *shape[-len(tensors[0][1]) :]), np.float32)
        for place, (name, _) in zip(stack, tensors, strict=True):
            tensor = checkpoint.read(checkpoint.own_name(name))
            place[...] = tensor.T if path[-1] == "kernel" else tensor
        return jnp.asarray(stack.reshape(shape), dtype)

    return nnx.from_flat_state([(path, leaf.replace(load(path, leaf.shape))) for path, leaf in leaves])


def _tensors(path: tuple[str, ...], shape: tuple[int, ...], layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the checkpoint's tensors that make up one parameter: one a layer for those of `layers`."""
    *modules, leaf = path
    ending = "bias" if leaf == "bias" else "weight"
    if modules[0] == "layers":
        names = [".".join(["model", "layers", str(layer), *modules[1:], ending]) for layer in range(layers)]
        shape = shape[1:]
    else:
        names = [".".join([*(modules if modules[0] == "lm_head" else ["model", *modules]), ending])]
    return [(name, shape[::-1] if leaf == "kernel" else shape) for name in names]


def _check(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], config: LlamaConfig) -> None:
    found = checkpoint.shapes
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(checkpoint.path, f"has no tensor {_some(missing)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(checkpoint.path, f"tensor {name} has shape {tuple(found[name])}; the config asks {shape}")
    extra = [name for name in found if name not in expected and not name.endswith(UNUSED)]
    if config.tied_embeddings:
        extra = [name for name in extra if name != checkpoint.own_name("lm_head.weight")]  # a copy of the embedding
    if extra:
        raise ModelError(checkpoint.path, f"has tensors that this model would not use: {_some(extra)}")


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first} (and {len(rest)} more)" if rest else first
