"""The `kvjax` program: `kvjax demo`, `kvjax generate`, `kvjax plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

import jax

from kvjax.commands import demo, generate, plan
from kvjax.commands.errors import CommandError
from kvjax.commands.interrupts import Interrupted, raising_interrupts
from kvjax.commands.output import READER_GONE, complain, prepare, say
from kvjax.commands.text import one_line

DESCRIPTION = """\
The KV cache for JAX, at work: serve a real language model out of a paged cache.

  kvjax demo                                  sixteen prompts, a progress bar, answers, a table, a picture
  kvjax generate --prompt "Once upon a time"  continue one prompt
  kvjax generate --prompts FILE.jsonl --json  answer a file of prompts, one JSON line each
  kvjax plan config.json --hbm 80GB           how many tokens and sequences fit a device

Run `kvjax COMMAND --help` for what a command can do."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose complaints are one line long."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status.

    0; 1 for what went wrong at work, of which stderr or the last line says what; 2 for bad usage; 130 for Ctrl-C, 143
    for SIGTERM, and 141, in silence, when whoever reads the output has left.
    """
    command = ""
    try:
        with raising_interrupts():
            prepare()
            try:
                options = _parser().parse_args(arguments)
            except SystemExit as done:  # --help, --version or bad usage: argparse has said it all
                say(end="")
                return int(done.code or 0)
            command = options.command
            status = options.run(options)
            say(end="")
            return status
    except CommandError as error:
        complain(command, f"error: {error}")
        return 1
    except BrokenPipeError:
        return READER_GONE
    except Interrupted as interrupt:
        complain(command, f"interrupted{interrupt.note and ': '}{interrupt.note}")
        return interrupt.status


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="kvjax", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, plan):
        command.add_parser(commands)
    return parser


def _version() -> str:
    try:
        version = metadata.version("kvjax")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    return f"kvjax {version}, jax {jax.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
