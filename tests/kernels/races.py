"""Races that an interpreter of Pallas kernels sees, as an exception."""

import contextlib
import io
from collections.abc import Callable, Iterator


class RaceFoundError(Exception):
    """The interpreter saw a race."""


@contextlib.contextmanager
def raised(reset: Callable[[], None]) -> Iterator[None]:
    """Raises RaceFoundError if a race is seen inside. Some versions of JAX raise when they see one, others only print.

    `reset` clears the interpreter's state, which an exception leaves behind.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except Exception as error:
        if "RACE DETECTED" in printed.getvalue() + str(error):
            raise RaceFoundError from error
        raise
    finally:
        reset()
    if "RACE DETECTED" in printed.getvalue():
        raise RaceFoundError(printed.getvalue())
