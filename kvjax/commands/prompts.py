"""Prompts from the command line or a file of JSON lines; a bad line spoils nothing but itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kvjax.commands.files import read_lines

KEYS = ("prompt", "prompt_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or what is wrong with it.

    Attributes:
      source: where it came from, for messages.
      text: the text, if it was given as text.
      ids: the token ids, if it was given as ids.
      problem: why it cannot be used; None if it can.
    """

    source: str
    text: str | None = None
    ids: tuple[int, ...] | None = None
    problem: str | None = None


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file of JSON lines, `{"prompt": TEXT}` or `{"prompt_ids": [IDS]}`; blank lines are skipped.

    Raises:
      CommandError: the file cannot be read or holds no line at all.
    """
    form = 'write one {"prompt": "…"} a line'
    return [_parse(source, line) for source, line in read_lines("--prompts", path, form)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError where a key comes twice, of which Python would keep the last."""
    entry: dict[str, Any] = {}
    for key, value in pairs:
        if key in entry:
            raise ValueError(f"the key {key!r} comes twice")
        entry[key] = value
    return entry


def _parse(source: str, line: bytes) -> Prompt:
    try:
        entry = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8; nested too deeply
        return Prompt(source, problem=f"is not JSON ({error})")
    if isinstance(entry, dict) and (unknown := [key for key in entry if key not in KEYS]):
        return Prompt(source, problem=f"has the unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    if not isinstance(entry, dict) or ("prompt" in entry) == ("prompt_ids" in entry):
        return Prompt(source, problem='must be an object with either "prompt" or "prompt_ids"')
    if "prompt" in entry:
        return check_text(source, entry["prompt"])
    ids = entry["prompt_ids"]
    if (
        not isinstance(ids, list)
        or not ids
        or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    ):
        return Prompt(source, problem='"prompt_ids" must be a list of token ids, at least one')
    return Prompt(source, ids=tuple(ids))


def check_text(source: str, text: Any) -> Prompt:
    """A prompt given as text."""
    if not isinstance(text, str) or not text:
        return Prompt(source, problem='"prompt" must be a text, not empty')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Prompt(source, problem=f'"prompt" is no valid Unicode text ({error.reason} at character {error.start})')
    return Prompt(source, text=text)
