"""What commands print: at once, in what the stream can show; one that cannot be written is an error of one line."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from kvjax.commands.errors import CommandError

READER_GONE = 128 + signal.SIGPIPE
"""The exit status that shells give a program whose pipe was closed at the other end."""


def prepare() -> None:
    """From here on, characters that stdout's encoding lacks are printed as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str = "", end: str = "\n") -> None:
    """Prints to stdout and flushes.

    Raises:
      CommandError: it cannot be written.
      BrokenPipeError: whoever read it has left.
    """
    if sys.stdout is None:  # Python's word for a closed file descriptor
        raise CommandError("standard output is closed")
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        # What could not be written must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandError(f"standard output: {error.strerror}") from error


def say_json(record: Mapping[str, Any]) -> None:
    """Prints one line of JSON; where stdout's encoding lacks a character, with JSON's own escapes."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(record)
    say(line)


def complain(command: str, message: str) -> None:
    """Prints one line to stderr.  Where there is no stderr, the exit status has to say it."""
    if sys.stderr is not None:
        print(f"{f'kvjax {command}'.strip()}: {message}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether a person sees stderr: the place for a progress bar."""
    return sys.stderr is not None and sys.stderr.isatty()
