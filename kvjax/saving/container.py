"""The file around a saved cache: a header, sections of bytes, and one checksum over everything.

    magic, 8 bytes | version, 4 | length of the header, 8 | header | sections, one after another | SHA-256 of all before

Integers are little-endian.  The header is an encoding (`kvjax.descriptor.encoding`) whose first part lists name and
length of every section, so that a file's length is known before anything in it is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.descriptor.encoding import EncodingError, decode, encode

MAGIC = b"KVJAX\r\n\x1a"
"""Its line ends do not survive a transfer in text mode."""
FILE_VERSION = 1

_START = struct.Struct("<8sIQ")
_CHECKSUM = hashlib.sha256().digest_size
_CHUNK = 1 << 24


class CacheFileError(ValueError):
    """A file that cannot be read as a saved cache.

    Attributes:
      path: the file.
      field: what in it is at fault: "file", "magic", "version", "length", "checksum", "header" or a part of the header.
    """

    def __init__(self, path: str | os.PathLike[str], field: str, problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {field}: {problem}")
        self.path = path
        self.field = field


@dataclass(frozen=True, slots=True)
class Container:
    """The contents of a file whose checksum is right.

    Attributes:
      header: what the writer put there.
      sections: name → bytes, views of the mapped file.
    """

    header: tuple
    sections: Mapping[str, np.ndarray]


def write_container(
    path: str | os.PathLike[str], header: tuple, sections: Mapping[str, int], blocks: Iterable[np.ndarray]
) -> None:
    """Writes a file at once or not at all: under another name first, flushed to the disk, then renamed.

    Args:
      path: where to; a file that is there is replaced.
      header: encodable values.
      sections: name and length in bytes of every section, in order.
      blocks: their bytes, in any pieces; taken one at a time.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".kvjax-", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(file, header, sections, blocks)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _flush_directory(path.parent)


def read_container(path: str | os.PathLike[str]) -> Container:
    """Maps a file and checks all of it: length, then checksum, then header.

    Raises:
      CacheFileError: a file that cannot be opened, is none of these, of another version, cut short, or changed.
    """
    try:
        size = os.path.getsize(path)
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CacheFileError(path, "file", f"cannot be read ({error.strerror})") from error
    if size < _START.size or data[: len(MAGIC)].tobytes() != MAGIC:
        raise CacheFileError(path, "magic", "this is no cache that kvjax.save wrote")
    _, version, length = _START.unpack(data[: _START.size].tobytes())
    if version != FILE_VERSION:
        raise CacheFileError(path, "version", f"{version}; this kvjax reads version {FILE_VERSION}")
    body = size - _CHECKSUM
    if _START.size + length > body:
        raise CacheFileError(path, "length", f"{size} bytes do not hold a header of {length}; the file was cut short")
    if _digest(data[:body]) != data[body:].tobytes():
        raise CacheFileError(
            path, "checksum", "does not match: the file was cut short or changed; save the cache again"
        )
    try:
        sections, header = decode(data[_START.size : _START.size + length].tobytes())
        _check_sections(sections, body - _START.size - length)
    except (EncodingError, TypeError, ValueError) as error:
        raise CacheFileError(path, "header", str(error)) from error
    found, start = {}, _START.size + length
    for name, size in sections:
        found[name] = data[start : start + size]
        start += size
    return Container(header, found)


def _check_sections(sections: Any, length: int) -> None:
    """ValueError unless the sections have names of their own and fill `length` bytes."""
    names = {name for name, size in sections if type(name) is str and type(size) is int and size >= 0}
    if len(names) != len(sections):
        raise ValueError("sections must have distinct names and lengths of at least 0")
    total = sum(size for _, size in sections)
    if total != length:
        raise ValueError(f"sections of {total} bytes where the file has {length}")


def _write(file: Any, header: tuple, sections: Mapping[str, int], blocks: Iterable[np.ndarray]) -> None:
    checksum = hashlib.sha256()
    written = 0

    def put(data: Any) -> None:
        checksum.update(data)
        file.write(data)

    encoded = encode((tuple(sections.items()), header))
    put(_START.pack(MAGIC, FILE_VERSION, len(encoded)))
    put(encoded)
    for block in blocks:
        flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        put(flat.data)
        written += flat.size
    if written != sum(sections.values()):
        raise ValueError(f"blocks of {written} bytes for sections of {sum(sections.values())}")
    file.write(checksum.digest())
    file.flush()
    os.fsync(file.fileno())


def _digest(data: np.ndarray) -> bytes:
    checksum = hashlib.sha256()
    for start in range(0, data.size, _CHUNK):
        checksum.update(data[start : start + _CHUNK])
    return checksum.digest()


def _flush_directory(directory: Path) -> None:
    """Makes a rename outlast a power cut, where the system lets the directory be opened: the file itself is there."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except PermissionError:  # a directory one may write to and not list; on Windows, any
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
