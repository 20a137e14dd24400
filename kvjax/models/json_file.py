"""JSON files that came with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.models.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; ModelError if it cannot be read or is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(path, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(path, f"holds a JSON {type(value).__name__}; it must be an object")
    return value
