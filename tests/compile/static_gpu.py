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

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.paged_attention import paged_attention
from pallas_kernels.hardware import GPUS, KIB, MIB, GpuFacts
from tests.compile.decode_case import CASES, DecodeCase, decode_arguments
from tests.compile.gpu_bound import bound, thread_blocks
from tests.compile.gpu_target import compile_for, mosaic_kernels
from tests.compile.sass import instructions, loads, loops

# The kernel is for Hopper; whether it takes this one is asked too. From NVIDIA's DGX B200 data sheet.
B200 = GpuFacts("b200", "NVIDIA B200", (10, 0), 148, 228 * KIB, 227 * KIB, 126 * MIB, 192 * 10**9, 8e12)


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
        blocks = thread_blocks(kernel.registers, kernel.threads, kernel.shared_bytes, facts)
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
