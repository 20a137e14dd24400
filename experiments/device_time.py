"""Times on an accelerator: calls that follow each other inside one program, so that the host is not in the figure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 9
SECONDS_A_RUN = 0.05  # of one timed run: thousands of times what starting it costs


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over repeats, and of the compilation before them."""

    median: float
    fastest: float
    slowest: float
    compile_seconds: float


def time_in_turns(call: Callable[..., Any], carry: Any, sets: tuple[Any, ...]) -> Timing:
    """Times `call(carry, *arrays) -> carry`, over the sets of arrays in turn.

    Each call takes what the one before it returned, so that none can be left out or run beside another. What does not
    depend on it may be computed once, as in a model's scan over layers.
    """

    def turns(count, carry, sets):
        def turn(_, carry):
            for arrays in sets:
                carry = call(carry, *arrays)
            return carry

        return jax.lax.fori_loop(0, count, turn, carry)

    start = time.perf_counter()
    compiled = jax.jit(turns).lower(jnp.int32(1), carry, sets).compile()
    compile_seconds = time.perf_counter() - start

    def run(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(jnp.int32(count), carry, sets))
        return time.perf_counter() - start

    run(1)
    count = max(1, min(10_000, round(SECONDS_A_RUN / run(1))))
    times = [run(count) / (count * len(sets)) for _ in range(REPEATS)]
    return Timing(statistics.median(times), min(times), max(times), compile_seconds)


def read_bandwidth(nbytes: int) -> float:
    """Bytes a second of a plain sum over `nbytes`, two arrays in turn."""
    arrays = tuple((jnp.full((nbytes // 4 // 1024, 1024), seed, jnp.float32),) for seed in (1.0, 2.0))

    def total(carry, array):
        return carry + 1e-9 * jnp.sum(array + carry)

    return arrays[0][0].nbytes / time_in_turns(total, jnp.float32(0), arrays).median


def copy_bandwidth(nbytes: int) -> float:
    """Bytes a second read and written, of an array of `nbytes` that is rewritten."""
    array = jnp.ones((nbytes // 4 // 1024, 1024), jnp.float32)
    return 2 * array.nbytes / time_in_turns(lambda carry: carry + 1e-6, array, ((),)).median
