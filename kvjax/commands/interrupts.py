"""Ctrl-C and SIGTERM as an exception that no library takes for an error of its own."""

from __future__ import annotations

import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.05


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived.

    Attributes:
      number: of the signal.
      note: what the user should know of the work that was cut short; set by who catches it on its way.
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.note = ""

    @property
    def status(self) -> int:
        """The exit status that shells give a program ended by the signal."""
        return 128 + self.number


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Within, SIGINT and SIGTERM raise `Interrupted` in the main thread; afterwards they do what they did before.

    A signal that the caller has the program ignore (`nohup`, a shell's background job) stays ignored.  Outside the main
    thread, which gets no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook

    def raise_again(ignored: Any) -> None:
        # Python drops what is raised in a finaliser or a garbage collector's callback, and jax has one of those.
        if isinstance(ignored.exc_value, Interrupted):
            threading.Timer(AGAIN_SECONDS, interrupt_main, [ignored.exc_value.number]).start()
        else:
            hook(ignored)

    try:
        sys.unraisablehook = raise_again
        for number, handler in former.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _interrupt)
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(number: int, _: FrameType | None) -> None:
    raise Interrupted(number)
