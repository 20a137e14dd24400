"""Steps that have been issued and may still run: what has to be waited for before memory changes under them."""

from __future__ import annotations

from collections import deque
from typing import Any

import jax


class Flight:
    """Counts steps as they are issued and as they complete.

    Attributes:
      issued: steps issued so far; the last one's number.
      completed: the number up to which all are complete.
    """

    def __init__(self) -> None:
        self.issued = self.completed = 0
        self._running: deque[tuple[int, Any]] = deque()

    def issue(self) -> int:
        """The number of a new step."""
        self.issued += 1
        return self.issued

    def follow(self, value: Any) -> None:
        """The step last issued, and all before it, are complete once the arrays in `value` are there."""
        self._running.append((self.issued, value))

    def poll(self) -> int:
        """Notes what has completed meanwhile, without waiting; the number up to which all are complete."""
        while self._running and all(leaf.is_ready() for leaf in _arrays(self._running[0][1])):
            self._finish()
        return self.completed

    def wait(self, step: int) -> bool:
        """Waits until `step` is complete; False if it cannot, as nobody said what to wait for."""
        while self.completed < step and self._running:
            self._finish()
        return self.completed >= step

    def _finish(self) -> None:
        step, value = self._running[0]
        jax.block_until_ready(value)
        self.completed = step
        self._running.popleft()


def _arrays(value: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array)]
