"""The `kvjax` program: `kvjax demo`, `kvjax generate`, `kvjax plan`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvjax.commands import demo, generate, plan
from kvjax.commands.errors import CommandError

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
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit status: 0, 1 for what went wrong at work, 2 for bad usage."""
    parser = OneLineParser(prog="kvjax", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (demo, generate, plan):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except CommandError as error:
        print(f"kvjax {options.command}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has left; give the interpreter nothing more to flush into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"kvjax {options.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
