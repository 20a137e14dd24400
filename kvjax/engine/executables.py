"""The compiled steps: one executable a function and bucket, the cache donated, compile time kept apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch
from typing import Any

import jax
import numpy as np

from kvjax.engine import burst, steps, swap_steps
from kvjax.engine.backing import Backing
from kvjax.engine.burst import Decode, Stream
from kvjax.engine.mirror import Mirror
from kvjax.engine.speculation import Drafter
from kvjax.engine.steps import Feed, Report, Slots
from kvjax.extents import Moves
from kvjax.models.protocol import Model

LEAST_BOUND = 256
"""Pages a fork or a release may touch at least: work this small costs nothing, compiling for less would."""


class Executables:
    """Runs the functions of `steps` on one cache.

    A call whose shapes were not seen before compiles first.  `compile_seconds` sums the time that took, by `clock`;
    `compiled` lists what was compiled, in order, as (function, bucket).  A `mirror` follows each call.
    """

    def __init__(
        self,
        model: Model,
        backing: Backing,
        drafter: Drafter,
        *,
        burst_steps: int,
        stream: Stream | None,
        mirror: Mirror | None,
        clock: Callable[[], float],
    ):
        self._clock = clock
        self._mirror = mirror
        self._parameters = model.parameters
        self._drafter = drafter
        self._functions: dict[str, Callable] = {
            "mixed": partial(steps.mixed_step, model, backing),
            "burst": partial(burst.decode_burst, model, backing, drafter, burst_steps, stream),
            "release": partial(steps.release_rows, backing),
            "fork": steps.fork_rows,
            "save": swap_steps.save_pages,
            "unpin": partial(swap_steps.unpin_pages, backing),
            "restore": partial(swap_steps.restore_pages, backing),
            "compact": partial(steps.compact_pages, backing),
        }
        self._executables: dict[tuple[str, int], Callable] = {}
        self.compile_seconds = 0.0

    @property
    def compiled(self) -> list[tuple[str, int]]:
        return list(self._executables)

    def mixed(self, cache: Any, feed: Feed, slots: Slots) -> tuple[Any, Report]:
        """`steps.mixed_step`; the bucket is the length of `feed.tokens`."""
        return self._run("mixed", feed.tokens.shape[0], (), self._parameters, cache, feed, slots)

    def burst(self, cache: Any, decode: Decode, slots: Slots) -> tuple[Any, Report]:
        """`burst.decode_burst`; the bucket is the number of slots."""
        return self._run("burst", slots.row.shape[0], (), self._parameters, cache, decode, slots)

    def release(self, cache: Any, rows: np.ndarray, pages: int) -> tuple[Any, Any, Any]:
        """`steps.release_rows` of rows that map `pages` pages in all."""
        bound = power_of_two(max(pages, LEAST_BOUND))
        return self._run("release", bound, (bound,), cache, rows)

    def fork(self, cache: Any, parent: np.ndarray, pages: int) -> tuple[Any, Any]:
        """`steps.fork_rows` of children that take `pages` pages in all."""
        bound = power_of_two(max(pages, LEAST_BOUND))
        return self._run("fork", bound, (bound,), cache, parent)

    def save(self, cache: Any, row: np.ndarray, logical: np.ndarray) -> tuple[Any, Any, Any]:
        """`swap_steps.save_pages`; the bucket is the length of the lists."""
        return self._run("save", len(row), (), cache, row, logical)

    def unpin(self, cache: Any, ids: Any) -> tuple[Any, Any, Any]:
        """`swap_steps.unpin_pages` of what `save` pinned."""
        return self._run("unpin", len(ids[0]), (), cache, ids)

    def restore(
        self, cache: Any, tokens: np.ndarray, row: np.ndarray, logical: np.ndarray, images: Any
    ) -> tuple[Any, Any, Any]:
        """`swap_steps.restore_pages`; the bucket is the number of images."""
        return self._run("restore", len(row), (), cache, tokens, row, logical, images)

    def compact(self, cache: Any, moves: Moves, group: int, pages: int) -> tuple[Any, Any, Any]:
        """`steps.compact_pages`; the bucket is the group."""
        return self._run("compact", group, (group, pages), cache, moves)

    def _run(self, name: str, bucket: int, static: tuple[int, ...], *arguments: Any) -> Any:
        executable = self._executables.get((name, bucket))
        if executable is None:
            started = self._clock()
            executable = self._compile(partial(self._functions[name], *static), arguments)
            self._executables[name, bucket] = executable
            self.compile_seconds += self._clock() - started
        result = executable(*arguments)
        if self._mirror is not None:
            self._mirror.follow(name, static, self._functions[name], arguments, result)
        return result

    def _compile(self, function: Callable, arguments: tuple[Any, ...]) -> Callable:
        return jax.jit(function, donate_argnames="cache").lower(*arguments).compile()


@singledispatch
def executables_of(backing: Backing) -> type[Executables]:
    """The kind of `Executables` that runs on a backing's cache."""
    return Executables


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()
