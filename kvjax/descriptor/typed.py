"""Frozen dataclasses whose fields are checked against their annotations when they are made."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints


class Typed:
    """Base of the descriptor's dataclasses: a field of another type is refused by name.

    The check is strict: True is no int, and a look-alike of another type would serialise as another value.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _hints(cls)
        for field in fields(cls):
            value, hint = getattr(self, field.name), hints[field.name]
            if hint is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif not matches(value, hint):
                wanted = str(hint).replace("kvjax.", "") if get_origin(hint) else hint.__name__
                raise ValueError(f"{cls.__name__}.{field.name}={value!r} must be of type {wanted}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def matches(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type: a class, Literal, X | None, or tuple[X, ...] and tuple[X, Y].

    Dataclasses are looked into: 2.0 heads equal 2 heads, and would serialise as something else.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin in (Union, UnionType):
        return any(matches(value, choice) for choice in arguments)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(matches(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(matches, value, arguments))
    if is_dataclass(hint):
        inner = _hints(cast(type, hint))
        return type(value) is hint and all(matches(getattr(value, name), inner[name]) for name in inner)
    return type(value) is (type(None) if hint is None else hint)
