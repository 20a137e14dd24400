"""What the decode kernel costs on one NVIDIA GPU: `python -m tests.compile.static_gpu TARGET FILE`.

Compiles it at every shape and writes what the assembler and the machine code say to FILE, as JSON.
`tests.compile.static_cost` runs this, one process a target, and prints it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from pallas_kernels.gpu.paged_attention import paged_attention

from pallas_kernels.arguments import Attention
from pallas_kernels.hardware import GPUS, KIB, MIB, GpuFacts
from tests.compile.decode_case import CASES, DecodeCase, decode_arguments
from tests.compile.gpu_target import MosaicKernel, compile_for, mosaic_kernels
from tests.compile.sass import Instruction, instructions, loads, loops

# NVIDIA's H100 data sheet, SXM board, dense bfloat16; H200 has the same multiprocessors.
PEAK_FLOPS = 989.4e12
TENSOR_FLOPS_A_CYCLE = 4096  # of one multiprocessor in dense 16-bit products (Hopper white paper, 2022)
REGISTERS = 65_536  # of one multiprocessor
REGISTERS_A_WARP_STEP = 256  # what a warp's registers are rounded up to
THREADS = 2048
THREAD_BLOCKS = 32
DRIVER_SHARED_BYTES = KIB  # of each thread block
LATENCY_SECONDS = 1e-6  # of a copy from memory under load, a generous round figure

# The kernel is for Hopper; whether it takes this one is asked too. From NVIDIA's DGX B200 data sheet.
B200 = GpuFacts("b200", "NVIDIA B200", (10, 0), 148, 228 * KIB, 227 * KIB, 126 * MIB, 192 * 10**9, 8e12)


def thread_blocks(kernel: MosaicKernel, facts: GpuFacts) -> dict[str, int]:
    """How many thread blocks a multiprocessor holds, by each of its resources."""
    warps = -(-kernel.threads // 32)
    per_warp = -(-kernel.registers * 32 // REGISTERS_A_WARP_STEP) * REGISTERS_A_WARP_STEP
    return {
        "by_registers": REGISTERS // (warps * per_warp),
        "by_shared_memory": facts.shared_memory_bytes // (kernel.shared_bytes + DRIVER_SHARED_BYTES),
        "by_threads": min(THREADS // kernel.threads, THREAD_BLOCKS),
    }


def bound(bodies: list[list[Instruction]], facts: GpuFacts, element_bytes: int) -> dict[str, Any]:
    """What one multiprocessor could take of K and V in a cycle, against what memory brings it.

    A product of 64 query lines does 2 · 64 operations on each element of K or V, which tells how much of them an
    iteration of the loop with the products handles. One warp of a warpgroup runs on each of the four schedulers, each
    of which issues one instruction a cycle.
    """
    hertz = PEAK_FLOPS / (facts.multiprocessors * TENSOR_FLOPS_A_CYCLE)
    needed = facts.memory_bytes_per_second / facts.multiprocessors / hertz
    main = max(bodies, key=lambda body: (sum(line.flops for line in body), -len(body)))
    flops = sum(line.flops for line in main)
    iteration_bytes = flops // (2 * 64) * element_bytes
    by_issue = iteration_bytes / len(main)
    by_tensor_cores = TENSOR_FLOPS_A_CYCLE / (2 * 64) * element_bytes
    return {
        "hertz": hertz,
        "memory_bytes_per_cycle": needed,
        "loop_instructions": len(main),
        "loop_bytes": iteration_bytes,
        "bytes_per_cycle_by_issue": by_issue,
        "bytes_per_cycle_by_tensor_cores": by_tensor_cores,
        "memory_bound": min(by_issue, by_tensor_cores) >= needed,
        "bytes_in_flight_needed": facts.memory_bytes_per_second * LATENCY_SECONDS / facts.multiprocessors,
    }


def our_attention(case: DecodeCase, facts: GpuFacts) -> tuple[Callable, tuple[Any, ...]]:
    """The kernel of this package and its arguments."""

    def function(q, pool, pages, tiles, page_offset):
        attention = Attention(value_dim=case.head_dim, scale=0.1)
        return paged_attention(q, pool, pages, tiles, page_offset, attention=attention, facts=facts), pool

    return function, decode_arguments(case, lane_multiple=1)


def measured(target: str, case: DecodeCase) -> dict[str, Any]:
    """The record of the kernel at one shape, or why it was refused."""
    facts = GPUS[target]
    record = {"target": target, "subject": "kvjax", **case.record()}
    try:
        function, shapes = our_attention(case, facts)
        with mosaic_kernels() as kernels:
            compile_for(target, function, *shapes, donate=(1,))
        codes = [[instruction for _, instruction in instructions(kernel.sass)] for kernel in kernels]
        products = [sum(instruction.flops > 0 for instruction in code) for code in codes]
        main = products.index(max(products))
        kernel = kernels[main]
        blocks = thread_blocks(kernel, facts)
        return record | {
            "kernels": len(kernels),
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "threads": kernel.threads,
            "shared_bytes": kernel.shared_bytes,
            "thread_blocks": blocks,
            "shared_bytes_in_use": min(blocks.values()) * kernel.shared_bytes,
            "wgmma": products[main],
            "loads": loads(codes[main]),
            **bound(loops(kernel.sass), facts, element_bytes=2),
        }
    except Exception as error:  # whatever the compilers raise is what is reported
        return record | {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]}


def refusal(case: DecodeCase, facts: GpuFacts) -> dict[str, Any]:
    """Whether the kernel takes a GPU that it was not written for."""
    function, shapes = our_attention(case, facts)
    record = {"target": facts.name, "subject": "kvjax", **case.record()}
    try:
        jax.eval_shape(function, *shapes)
    except NotImplementedError as error:
        return record | {"refused": f"NotImplementedError: {error}"}
    return record | {"refused": None}


if __name__ == "__main__":
    name, file = sys.argv[1:]
    found = {"kernels": [measured(name, case) for case in CASES], "others": [refusal(CASES[0], B200)]}
    Path(file).write_text(json.dumps(found, indent=1))
