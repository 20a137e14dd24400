"""The console script `kvjax`: quiet from the first moment.

Importing kvjax imports jax, which takes a second.  Ctrl-C in that second would show where in jax it hit; so this stands
outside the package, where it runs before anything of it is imported.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Runs `kvjax.cli.main`; before and after it, SIGINT and SIGTERM end the process with one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from kvjax.cli import main

    return main()


def _end(number: int, _: FrameType | None) -> None:
    # Not an exception: one that is raised in the midst of an import may be lost, or shown as a traceback.
    os.write(2, b"kvjax: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
