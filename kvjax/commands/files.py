"""Files that a command reads line by line, and files that it writes: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvjax.commands.errors import CommandError
from kvjax.commands.text import one_line


def read_lines(flag: str, path: str, form: str) -> list[tuple[str, bytes]]:
    """The lines of a file that are not blank, each with "path:number" to name it by.

    Raises:
      CommandError: the file that `flag` names cannot be read, or has no such line; says the `form` of one.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise CommandError(f"{flag} {path}: {error.strerror or error}") from error
    found = [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise CommandError(f"{flag} {path}: the file is empty; {form}")
    return found


def check_writable(name: str) -> None:
    """Says now rather than after long work that a file cannot be written; leaves nothing behind but its folder.

    Raises:
      CommandError: it names the file.
    """
    path = Path(name)
    if path.is_dir():
        raise CommandError(f"{name}: Is a directory")
    if not _is_special(path):
        write_file(name, lambda part: part.touch(), keep=False)


def write_file(name: str, write: Callable[[Path], object], *, keep: bool = True) -> None:
    """Has `write` write a file beside `name`, which takes that place when it is whole; an error leaves nothing behind.

    A device or a pipe is written directly.  Without `keep` the file is only tried out.

    Raises:
      CommandError: it cannot be written; names the file.
    """
    path = Path(name).resolve()
    part = path.with_name(f".{path.name}.part")
    try:
        if _is_special(path):
            write(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(part)
            if keep:
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CommandError(f"{name}: {one_line(reason)}") from error


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
