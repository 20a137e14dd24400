"""Reads the container of a GGUF file: metadata and tensor directory, each bound checked before it is trusted.

Format: ggml's `docs/gguf.md`, versions 2 and 3, little-endian.  The `gguf` package's reader makes an array of every
string (5 s for a vocabulary of 49 thousand) and does not notice a file that ends early, so this walks the bytes itself.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from kvjax.models.errors import ModelError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type → struct code; 8 is a string and 9 an array."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies: `shape` in numpy order (slowest axis first), `start` and `size` in bytes of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file.

    Attributes:
      path: where it is.
      metadata: its key-value pairs; arrays are lists.
      tensors: its tensor directory; every tensor lies wholly inside the file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    _memory: mmap.mmap

    def read(self, name: str) -> np.ndarray:
        """A tensor, dequantised to float32."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._memory, np.uint8, count=tensor.size, offset=tensor.start)
        try:
            return dequantize(raw, tensor.kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelError(self.path, f"tensor {name} has type {tensor.kind.name}, which cannot be read") from error


def open_gguf(path: str | PathLike[str]) -> GGUFFile:
    """Maps a GGUF file and reads its directory.

    Raises:
      ModelError: it cannot be opened, is no GGUF file, or ends early.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise ModelError(path, f"cannot be read ({error})") from error
    cursor = _Cursor(path, memory)
    if cursor.bytes(4) != b"GGUF":
        raise ModelError(path, "is not a GGUF file: it does not begin with 'GGUF'")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(path, f"has GGUF version {version}; versions 2 and 3 (little-endian) can be read")
    tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(pair_count)}
    entries = [_read_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(path, f"field general.alignment is {alignment!r}; it must be a positive integer")
    base = -(-cursor.position // alignment) * alignment
    return GGUFFile(path, metadata, {entry[0]: _locate(path, base, len(memory), *entry) for entry in entries}, memory)


class _Cursor:
    """A position in the file that never runs past its end."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path, self.memory, self.position = path, memory, 0

    def bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.memory):
            raise ModelError(self.path, f"is truncated: its header needs byte {end} and it has {len(self.memory)}")
        start, self.position = self.position, end
        return self.memory[start:end]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return self.bytes(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise ModelError(self.path, f"holds a string that is not UTF-8 before byte {self.position}") from error

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in SCALARS:
                raw = self.bytes(count * struct.calcsize(SCALARS[element]))
                return list(struct.unpack(f"<{count}{SCALARS[element]}", raw))
            if element == ARRAY:
                raise ModelError(self.path, f"holds an array of arrays before byte {self.position}; none is known")
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise ModelError(self.path, f"holds a value of unknown type {kind} before byte {self.position}")
        return self.scalar(SCALARS[kind])


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset) of the next tensor of the directory."""
    name = cursor.string()
    axes = cursor.scalar("I")
    if axes > 4:
        raise ModelError(cursor.path, f"tensor {name} has {axes} axes; GGUF allows 4")
    shape = tuple(cursor.scalar("Q") for _ in range(axes))
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _locate(
    path: Path, base: int, length: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GGUFTensor:
    if kind not in GGML_QUANT_SIZES:
        raise ModelError(path, f"tensor {name} has unknown type {kind}")
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not shape or shape[-1] % elements:
        raise ModelError(path, f"tensor {name} has shape {shape}; its type needs rows of a multiple of {elements}")
    size = math.prod(shape) // elements * block_bytes
    if base + offset + size > length:
        raise ModelError(path, f"is truncated: tensor {name} ends at byte {base + offset + size} and it has {length}")
    return GGUFTensor(GGMLQuantizationType(kind), shape, base + offset, size)
