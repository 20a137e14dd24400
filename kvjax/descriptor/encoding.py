"""Values as bytes, one way only: typed and length-delimited, so that no two different values serialise alike.

Every value is a tag, a length of 8 bytes (big-endian) and as many bytes of content:

    n  None, empty                          s  text in UTF-8, as it is (no normalisation)
    b  a truth value, one byte              y  bytes
    i  an integer, decimal                  t  a tuple: its values, one after another
    f  a float, IEEE 754 binary64           d  a dataclass: its name, then name and value of each field
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

_HEAD = struct.Struct(">cQ")


class EncodingError(ValueError):
    """Bytes that are no encoding, or a value that has none."""


def encode(value: Any) -> bytes:
    """The bytes of a value; EncodingError for NaN, text with lone surrogates, and types other than the above."""
    if value is None:
        return _delimited(b"n", b"")
    if isinstance(value, bool):
        return _delimited(b"b", b"\1" if value else b"\0")
    if type(value) is int:
        return _delimited(b"i", str(value).encode())
    if type(value) is float:
        if math.isnan(value):
            raise EncodingError("NaN equals nothing, not even itself, and cannot be part of a contract")
        return _delimited(b"f", struct.pack(">d", value + 0.0))  # −0.0 equals 0.0, so both are written 0.0.
    if type(value) is str:
        try:
            return _delimited(b"s", value.encode())
        except UnicodeEncodeError as error:
            raise EncodingError(f"{value!r} is no Unicode text ({error.reason})") from error
    if type(value) is bytes:
        return _delimited(b"y", value)
    if type(value) is tuple:
        return _delimited(b"t", b"".join(map(encode, value)))
    if is_dataclass(value) and not isinstance(value, type):
        parts = [encode(type(value).__name__)]
        for field in fields(value):
            parts += [encode(field.name), encode(getattr(value, field.name))]
        return _delimited(b"d", b"".join(parts))
    raise EncodingError(f"{value!r} of type {type(value).__name__} has no encoding; use tuples and Python's own types")


def decode(data: bytes, classes: Mapping[str, type] = MappingProxyType({})) -> Any:
    """The value of an encoding.

    Args:
      data: the bytes.
      classes: the dataclasses that may occur, by name.

    Raises:
      EncodingError: bytes that `encode` would not have written, or a dataclass of other fields than expected.
    """
    value, end = _decode(data, 0, classes)
    if end != len(data) or encode(value) != data:
        raise EncodingError(f"{len(data)} bytes are not the one encoding of a value")
    return value


def _delimited(tag: bytes, content: bytes) -> bytes:
    return _HEAD.pack(tag, len(content)) + content


def _decode(data: bytes, start: int, classes: Mapping[str, type]) -> tuple[Any, int]:
    if start + _HEAD.size > len(data):
        raise EncodingError(f"the encoding ends within a value, at byte {len(data)}")
    tag, length = _HEAD.unpack_from(data, start)
    start += _HEAD.size
    end = start + length
    if end > len(data):
        raise EncodingError(f"a value of {length} bytes at byte {start} goes past the end, {len(data)}")
    content = data[start:end]
    try:
        return _value(tag, content, classes), end
    except (ValueError, TypeError, struct.error, RecursionError) as error:
        if isinstance(error, EncodingError):
            raise
        raise EncodingError(f"the value at byte {start} cannot be read: {error}") from error


def _value(tag: bytes, content: bytes, classes: Mapping[str, type]) -> Any:
    match tag:
        case b"n":
            return None
        case b"b":
            return content == b"\1"
        case b"i":
            return int(content)
        case b"f":
            return struct.unpack(">d", content)[0]
        case b"s":
            return content.decode()
        case b"y":
            return content
        case b"t":
            return tuple(_items(content, classes))
        case b"d":
            return _record(_items(content, classes), classes)
    raise EncodingError(f"tag {tag!r} is not known")


def _items(content: bytes, classes: Mapping[str, type]) -> list[Any]:
    items, place = [], 0
    while place < len(content):
        item, place = _decode(content, place, classes)
        items.append(item)
    return items


def _record(items: list[Any], classes: Mapping[str, type]) -> Any:
    name, names, values = items[0] if items else None, items[1::2], items[2::2]
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        raise EncodingError(f"a record of {name!r} is not expected here")
    expected = [field.name for field in fields(cls)]
    if names != expected or len(values) != len(names):
        raise EncodingError(f"a {name} has fields {expected}, not {names}")
    return cls(**dict(zip(names, values, strict=True)))
