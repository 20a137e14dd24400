"""The contract's problems with keys and values in spans instead of pages; whatever no query sees stays poison."""

from typing import Any

import numpy as np
from jaxtyping import Shaped

from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.span_attention import RECORD_BYTES
from tests.kernels import contract
from tests.kernels.contract import LAYER, LAYERS, UNUSED_ENTRY, Case, Problem

GAP_BYTES = 2 * RECORD_BYTES  # of something else, before the layers in a record and after them


def lay_out(problem: Problem) -> tuple[Shaped[np.ndarray, "rows span_tokens record"], np.ndarray]:
    """(memory, start): the middle layer of three in each token's record, between other things."""
    case, pool = problem.case, problem.pool
    _, kv_heads, size, lanes = pool.shape
    layer, gap = kv_heads * lanes, GAP_BYTES // pool.dtype.itemsize
    unit = RECORD_BYTES // pool.dtype.itemsize
    record = -(-(2 * gap + LAYERS * layer) // unit) * unit
    tokens = max(BLOCK, -(-max(case.lengths) // BLOCK) * BLOCK)
    poison = -128 if pool.dtype == np.int8 else np.nan
    memory = np.full((len(case.lengths), tokens, record), poison, pool.dtype)
    start = gap + LAYER * layer
    for row, column in zip(*np.nonzero(problem.pages != UNUSED_ENTRY), strict=True):
        slots = pool[problem.page_offset + problem.pages[row, column]].swapaxes(0, 1).reshape(size, layer)
        seen = slots[: tokens - column * size]
        memory[row, column * size : (column + 1) * size, start : start + layer] = seen
    return memory, np.array(start, np.int32)


def run(kernel: Any, case: Case) -> None:
    """Runs `kernel(q, memory, tiles, start, kv_heads=…, attention=…, sinks=…, scales=…)` on a case and checks it."""
    problem = contract.make_problem(case)
    memory, start = lay_out(problem)
    options = {"kv_heads": case.kv_heads, "attention": problem.attention}
    contract.check(problem, kernel(problem.q, memory, problem.tiles, start, **options, **problem.traced))
