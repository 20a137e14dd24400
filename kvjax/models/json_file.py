"""Text and JSON files that came with a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvjax.models.errors import ModelError


def read_text(path: Path) -> str:
    """A file's text; ModelError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(path, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ModelError(path, f"is not UTF-8 ({error.reason} at byte {error.start})") from error


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; ModelError if it cannot be read or is anything else."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON; nested too deeply
        raise ModelError(path, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(path, f"holds a JSON {type(value).__name__}; it must be an object")
    return value
