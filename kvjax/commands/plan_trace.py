"""The lengths to plan for, from a file of JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvjax.commands.errors import CommandError
from kvjax.commands.files import read_lines

FORM = 'a number of tokens, {"length": N}, or {"prompt_tokens": N, "output_tokens": N, "shared_prefix_tokens": N}'


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by their lengths.

    Attributes:
      lengths: tokens of each, answer included.
      prompts: prompt tokens of each.
      shared: prompt tokens that an earlier one had; None if no line says.
    """

    lengths: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    shared: tuple[int, ...] | None = None


def read_trace(path: str) -> Trace:
    """Reads a trace; blank lines are skipped.

    Raises:
      CommandError: the file cannot be read, has no lengths, or a line is not of the form; names the line.
    """
    lines = read_lines("--trace", path, f"write one line a request: {FORM}")
    requests = [_parse(source, line) for source, line in lines]
    shared = [request[2] for request in requests]
    known = any(one is not None for one in shared)
    return Trace(
        tuple(request[0] for request in requests),
        tuple(request[1] for request in requests),
        tuple(one or 0 for one in shared) if known else None,
    )


def _parse(source: str, line: bytes) -> tuple[int, int, int | None]:
    """(tokens, prompt tokens, shared tokens or None) of a line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--trace {source}: is not JSON ({error})") from error
    if isinstance(entry, dict) and "prompt_tokens" in entry:
        prompt = _count(source, entry, "prompt_tokens", least=1)
        output = _count(source, entry, "output_tokens", least=0) if "output_tokens" in entry else 0
        shared = _count(source, entry, "shared_prefix_tokens", least=0) if "shared_prefix_tokens" in entry else None
        if shared is not None and shared > prompt:
            raise CommandError(f"--trace {source}: shared_prefix_tokens={shared} exceeds prompt_tokens={prompt}")
        return prompt + output, prompt, shared
    entry = entry if isinstance(entry, dict) else {"length": entry}
    length = _count(source, entry, "length", least=1)
    return length, length, None


def _count(source: str, entry: dict[str, Any], field: str, *, least: int) -> int:
    value = entry.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CommandError(f"--trace {source}: {field} is {value!r}; write {FORM}")
    return value
