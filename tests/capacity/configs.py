"""Configs of published models: the fields that matter for the cache and the weights, with the publishers' values."""

from __future__ import annotations

import json
from typing import Any

from kvjax.architecture import Architecture, read_architecture
from tests.models.decoding import FIXTURES

DIRECTORY = FIXTURES / "configs"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))


def config(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def architecture(name: str) -> Architecture:
    return read_architecture(config(name))
