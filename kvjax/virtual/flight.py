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
        self._running: deque[tuple[int, list[Any]]] = deque()

    def issue(self) -> int:
        """The number of a new step."""
        self.issued += 1
        return self.issued

    def follow(self, value: Any) -> None:
        """The step last issued, and all before it, are complete once the leaves of `value` are ready: jax arrays, or
        whatever has their `is_ready` and `block_until_ready`; other leaves are there already."""
        leaves = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "is_ready")]
        self._running.append((self.issued, leaves))

    def poll(self) -> int:
        """Notes what has completed meanwhile, without waiting; the number up to which all are complete."""
        while self._running and all(leaf.is_ready() for leaf in self._running[0][1]):
            self._finish()
        return self.completed

    def wait(self, step: int) -> bool:
        """Waits until `step` is complete; False if it cannot, as nobody said what to wait for."""
        while self.completed < step and self._running:
            self._finish()
        return self.completed >= step

    def _finish(self) -> None:
        step, leaves = self._running[0]
        for leaf in leaves:
            leaf.block_until_ready()
        self.completed = step
        self._running.popleft()
