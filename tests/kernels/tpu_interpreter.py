"""Runs TPU kernels under the TPU interpreter, with race detection, and holds them to the contract."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hardware import TPU_V6E, TpuFacts
from tests.kernels import contract, races

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def run(
    kernel: Callable,
    problem: contract.Problem,
    *,
    facts: TpuFacts = TPU_V6E,
    interpret: pltpu.InterpretParams = INTERPRET,
    pages_per_block: int | None = None,
) -> None:
    """Holds a kernel to its answer of a problem; raises races.RaceFoundError where the interpreter sees a race."""
    # Small blocks, so that a context takes several and a table slice ends inside a long row.
    pages_per_block = pages_per_block or 128 // problem.case.page_size
    options: dict[str, Any] = {"facts": facts, "interpret": interpret, "pages_per_block": pages_per_block}
    attention = jax.jit(partial(kernel, **options), static_argnames="attention")
    with races.raised(pltpu.reset_tpu_interpret_mode_state):
        contract.check(problem, attention(*problem.arrays, attention=problem.attention, **problem.traced))
