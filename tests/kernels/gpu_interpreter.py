"""The GPU interpreter, with NaN in memory that nobody wrote."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hardware import H200
from tests.kernels import races


def run(
    attend: Callable,
    contract: Callable,
    case: Any,
    *,
    static: tuple[str, ...],
    workers: int,
    races_too: bool,
) -> None:
    """`contract(kernel, case)` with the kernel interpreted; RaceFoundError if it has a race."""
    interpret = plgpu.InterpretGPUParams(detect_races=races_too, uninitialized_memory="nan")
    kernel = jax.jit(partial(attend, facts=H200, workers=workers, interpret=interpret), static_argnames=static)
    with races.raised(reset_gpu_interpret_mode_state):
        contract(kernel, case)
