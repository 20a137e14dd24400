"""Loads a Hugging Face directory: config.json, safetensors and, if it is there, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.models.config import LlamaConfig
from kvjax.models.errors import ModelError
from kvjax.models.json_file import read_object
from kvjax.models.llama import LlamaModel
from kvjax.models.loading import LoadedModel, end_tokens
from kvjax.models.tokenizer import tokenizer_from_directory
from kvjax.models.weights import UNUSED, load_parameters

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
"""What weights may be stored as.  Integers and 8-bit floats mean little without the scales of their quantisation."""


def load_huggingface(directory: str | PathLike[str], dtype: str = "float32") -> LoadedModel:
    """Loads a model directory as `save_pretrained` writes it: weights as `dtype`, whatever they are stored as.

    Raises:
      ModelError: a file is missing or damaged, or the config says something that this loader does not know.
    """
    directory = Path(directory)
    config = read_object(directory / "config.json")
    try:
        shape = LlamaConfig.from_huggingface(config)
    except ValueError as error:
        raise ModelError(directory / "config.json", str(error)) from error
    tokenizer, eos = tokenizer_from_directory(directory), _eos(directory, config)
    parameters = load_parameters(shape, dtype, SafetensorsCheckpoint(directory))
    return LoadedModel(LlamaModel(shape, dtype, parameters), tokenizer, directory.resolve().name, eos)


class SafetensorsCheckpoint:
    """The tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        if (directory / INDEX).exists():
            files = _shards(directory / INDEX)
        elif (directory / WEIGHTS).exists():
            files = [directory / WEIGHTS]
        else:
            raise ModelError(directory, f"has neither {WEIGHTS} nor {INDEX}")
        self._files: dict[str, Any] = {}  # tensor name → the open file that holds it
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            self._add(path)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def own_name(self, name: str) -> str:
        return name

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def _add(self, path: Path) -> None:
        file = _open(path)
        for name in file.keys():  # noqa: SIM118  it is no mapping
            tensor = file.get_slice(name)
            if tensor.get_dtype() not in DTYPES and not name.endswith(UNUSED):
                known = ", ".join(DTYPES)
                raise ModelError(path, f"tensor {name} has dtype {tensor.get_dtype()}, not supported; known: {known}")
            self._files[name], self._shapes[name] = file, tuple(tensor.get_shape())


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(index, "field weight_map must be an object of tensor name → file name")
    return [index.parent / file for file in dict.fromkeys(weight_map.values())]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ModelError(path, f"cannot be read as safetensors ({error})") from error


def _eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end tokens: an integer, a list or nothing, in generation_config.json, which goes first, or config.json."""
    path, fields = directory / "config.json", config
    if (directory / "generation_config.json").exists():
        generation = read_object(directory / "generation_config.json")
        if generation.get("eos_token_id") is not None:
            path, fields = directory / "generation_config.json", generation
    value = fields.get("eos_token_id")
    return end_tokens(path, "eos_token_id", [] if value is None else value if isinstance(value, list) else [value])
