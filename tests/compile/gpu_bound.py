"""What a Hopper multiprocessor holds of a kernel, and how fast it could take keys and values."""

from typing import Any

from pallas_kernels.hardware import KIB, GpuFacts
from tests.compile.sass import Instruction

# NVIDIA's H100 data sheet, SXM board, dense bfloat16; H200 has the same multiprocessors.
PEAK_FLOPS = 989.4e12
TENSOR_FLOPS_A_CYCLE = 4096  # of one multiprocessor in dense 16-bit products (Hopper white paper, 2022)
REGISTERS = 65_536  # of one multiprocessor
REGISTERS_A_WARP_STEP = 256  # what a warp's registers are rounded up to
THREADS = 2048
THREAD_BLOCKS = 32
DRIVER_SHARED_BYTES = KIB  # of each thread block
LATENCY_SECONDS = 1e-6  # of a copy from memory under load, a generous round figure


def thread_blocks(registers: int, threads: int, shared_bytes: int, facts: GpuFacts) -> dict[str, int]:
    """How many thread blocks a multiprocessor holds, by each of its resources."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTERS_A_WARP_STEP) * REGISTERS_A_WARP_STEP
    return {
        "by_registers": REGISTERS // (warps * per_warp),
        "by_shared_memory": facts.shared_memory_bytes // (shared_bytes + DRIVER_SHARED_BYTES),
        "by_threads": min(THREADS // threads, THREAD_BLOCKS),
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
