"""What the inner loops of decode kernels cost on one TPU: `python -m tests.compile.static_tpu TARGET FILE`.

Compiles every subject at every shape and writes what the bundles say to FILE, as JSON. `tests.compile.static_cost` runs
this, one process a target, and prints it.
"""

from tests.compile.bundles import Kernel, ListingError, Loop, Work, kernels  # first: it says how libtpu is loaded

# isort: split
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import paged_attention as jax_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from pallas_kernels.arguments import Attention
from pallas_kernels.hardware import TPUS, TpuFacts
from pallas_kernels.tpu.extent_attention import extent_attention
from pallas_kernels.tpu.paged_attention import paged_attention
from tests.compile.decode_case import CASES, MILLION, DecodeCase, decode_arguments
from tests.compile.tpu_target import abstract_mesh, compile_for

# Rows that a matrix unit takes in a cycle: a matmul of 8 rows holds it for 8 bundles up to v5p and for 4 since, by the
# capacities in the compiler's own static-bundle-profile.
ROWS_A_CYCLE = {"v4": 1, "v5e": 1, "v5p": 1, "v6e": 2, "tpu7x": 2}
# Of a TensorCore, where Google publishes more bandwidth than JAX knows: the higher figure is harder to keep up with.
PUBLISHED_BYTES_PER_SECOND = {"v5p": 2.765e12 / 2}  # cloud.google.com/tpu/docs/v5p
PEER_BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Program:
    """A function to compile, and how much of K and V one iteration of its inner loop handles.

    How much work an iteration over runs is at most, depends on how many runs there are.
    """

    function: Callable
    shapes: tuple[Any, ...]
    block_bytes: int
    donate: tuple[int, ...] = ()
    in_runs: bool = False


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


_ints = partial(_array, dtype=jnp.int32)


def our_attention(in_runs: bool, case: DecodeCase, facts: TpuFacts) -> Program:
    """The kernels of this package: over pages, or over runs of them."""
    shapes = decode_arguments(case, lane_multiple=128, in_runs=in_runs)
    kernel: Callable = extent_attention if in_runs else paged_attention

    def function(q, pool, pages, tiles, page_offset):
        attention = Attention(value_dim=case.head_dim, scale=0.1)
        return kernel(q, pool, pages, tiles, page_offset, attention=attention, facts=facts), pool

    with jax.sharding.use_abstract_mesh(abstract_mesh(facts.name)):
        return Program(function, shapes, ring_slot_bytes(jax.make_jaxpr(function)(*shapes)), (1,), in_runs)


def ring_slot_bytes(jaxpr: jax.extend.core.ClosedJaxpr) -> int:
    """What one buffer holds of the ring of a Pallas kernel: its largest scratch, whose first axis counts buffers."""
    calls = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "pallas_call"]
    (refs,) = [call.params["jaxpr"].invars[-call.params["grid_mapping"].num_scratch_operands :] for call in calls]
    sizes = [ref.aval.size * ref.aval.dtype.itemsize // ref.aval.shape[0] for ref in refs if len(ref.aval.shape) > 2]
    return max(sizes)


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """All equations, those of jitted functions inside included."""
    for eqn in jaxpr.eqns:
        yield eqn
        if "jaxpr" in eqn.params and eqn.primitive.name != "pallas_call":
            yield from equations(eqn.params["jaxpr"].jaxpr)


def jax_ragged(queries_per_block: int, case: DecodeCase, facts: TpuFacts) -> Program:
    """jax's ragged_paged_attention, which other kernels are measured against. Pages are `[token, 2 · head, dim]`."""
    pages = min(PEER_BLOCK_TOKENS // case.page_size, case.width)

    def function(q, kv, lengths, table, starts, rows):
        return ragged_paged_attention(
            q,
            kv,
            lengths,
            table,
            starts,
            rows,
            sm_scale=0.1,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries_per_block,
        )

    shapes = (
        _array(case.rows, case.q_heads, case.head_dim),
        _array(case.total_pages, case.page_size, 2 * case.kv_heads, case.head_dim),
        _ints(case.rows),
        _ints(case.rows, case.width),
        _ints(case.rows + 1),
        _ints(1),
    )
    return Program(function, shapes, pages * case.page_bytes)


def jax_paged(case: DecodeCase, facts: TpuFacts) -> Program:
    """jax's paged_attention. Its inner loop takes one KV head at a time; two cores share the rows if it is told so."""
    pages = PEER_BLOCK_TOKENS // case.page_size
    options = {"pages_per_compute_block": pages, "megacore_mode": "batch" if facts.tensor_cores > 1 else None}

    def function(q, keys, values, lengths, table):
        return jax_paged_attention.paged_attention(q, keys, values, lengths, table, **options)

    half = _array(case.kv_heads, case.total_pages, case.page_size, case.head_dim)
    shapes = (_array(case.rows, case.q_heads, case.head_dim), half, half, _ints(case.rows))
    return Program(function, (*shapes, _ints(case.rows, case.width)), pages * case.page_bytes // case.kv_heads)


SUBJECTS: dict[str, Callable[[DecodeCase, TpuFacts], Program]] = {
    "kvjax": partial(our_attention, False),
    "kvjax, pages in runs": partial(our_attention, True),
    "jax ragged, 1 query a block": partial(jax_ragged, 1),
    "jax ragged, 8 queries a block": partial(jax_ragged, 8),
    "jax ragged, 32 (its default)": partial(jax_ragged, 32),
    "jax paged_attention": jax_paged,
}


def chip(target: str) -> dict[str, Any]:
    """The clock and the memory bandwidth of one TensorCore, and what they are derived from."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(target)):
        info = pltpu.get_tpu_info()
    rows = ROWS_A_CYCLE[target]
    hertz = info.bf16_ops_per_second / (2 * info.num_mxus * info.mxu_column_size**2 * rows)
    bandwidth = max(info.mem_bw_bytes_per_second, PUBLISHED_BYTES_PER_SECOND.get(target, 0))
    return {
        "peak_flops": info.bf16_ops_per_second,
        "mxus": info.num_mxus,
        "mxu_size": info.mxu_column_size,
        "rows_a_cycle": rows,
        "hertz": hertz,
        "hbm_bytes_per_second": bandwidth,
        "hbm_bytes_per_cycle": bandwidth / hertz,
    }


def bundles_of_a_run(loop: Loop) -> int:
    """What it takes to walk to the next run and to start its copy, for a block that lies in several."""
    (pieces,) = [inner for inner in loop.inner if inner.kernel.work(inner.first, inner.end).copies]
    (walk,) = pieces.inner
    least = [part.shortest(0) for part in (pieces, walk)]
    return sum(work.bundles for work in least if work is not None)


def cost(kernel: Kernel, program: Program, page_bytes: int, bytes_per_cycle: float) -> dict[str, Any]:
    """What one iteration of the kernel's inner loop costs, in bundles and against the copy of as many bytes."""
    block_bytes = program.block_bytes
    loop = kernel.innermost(block_bytes)
    shortest = loop.shortest(block_bytes) or Work()
    longest = None if program.in_runs else loop.longest(block_bytes)
    units = list(kernel.units)
    # A core that works alone has the memory of both to keep up with.
    bytes_per_cycle *= 2 if kernel.one_core else 1
    return {
        "one_core": kernel.one_core,
        "share_of_hbm": block_bytes / shortest.bundles / bytes_per_cycle,
        "block_bytes": block_bytes,
        "copies": shortest.copies,
        "bundles": shortest.bundles,
        "bundles_longest": longest and longest.bundles,
        "bundles_of_a_run": bundles_of_a_run(loop) if program.in_runs else None,
        "bytes_per_bundle": block_bytes / shortest.bundles,
        "bytes_per_bundle_longest": longest and block_bytes / longest.bundles,
        "units": kernel.utilisation(shortest),
        "vector_spills": shortest.use[units.index("VSTORE:SPILL")],
        "vector_fills": shortest.use[units.index("VLOAD:FILL")],
        "scalar_spills": kernel.scalar_spills,
        "copy_cycles_per_page": page_bytes / bytes_per_cycle,
        "compute_cycles_per_page": page_bytes * shortest.bundles / block_bytes,
        "memory_bound": block_bytes / shortest.bundles >= bytes_per_cycle,
        "memory_bound_longest": longest and block_bytes / longest.bundles >= bytes_per_cycle,
    }


def reason(error: Exception) -> str:
    """The first telling line of a refusal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "exceed" in line.lower() or "ran out" in line.lower()), lines[0])
    return f"{type(error).__name__}: {telling}"[:300]


def measured(target: str, case: DecodeCase, subject: str, bytes_per_cycle: float) -> dict[str, Any]:
    """The record of one subject at one shape: its cost, or why it was refused."""
    record = {"target": target, "subject": subject, **case.record()}
    program = SUBJECTS[subject](case, TPUS[target])
    try:
        (kernel,) = kernels(target, program.function, *program.shapes, donate=program.donate)
    except ListingError:
        raise
    except Exception as error:  # whatever the compiler raises is what is reported
        return record | {"refused": reason(error)}
    return record | cost(kernel, program, case.page_bytes, bytes_per_cycle)


def compiles(target: str, case: DecodeCase, subject: str) -> dict[str, Any]:
    """Whether a subject compiles at a shape at all."""
    program = SUBJECTS[subject](case, TPUS[target])
    record = {"target": target, "subject": subject, **case.record()}
    try:
        compile_for(target, program.function, *program.shapes, donate=program.donate)
    except Exception as error:  # as above
        return record | {"refused": reason(error)}
    return record | {"refused": None}


def report(target: str) -> Iterator[tuple[str, Any]]:
    facts = chip(target)
    yield "chip", {"target": target, **facts}
    bytes_per_cycle = facts["hbm_bytes_per_cycle"]
    yield "loops", [measured(target, case, subject, bytes_per_cycle) for case in CASES for subject in SUBJECTS]
    yield "million", [compiles(target, MILLION, subject) for subject in SUBJECTS]


if __name__ == "__main__":
    name, file = sys.argv[1:]
    Path(file).write_text(json.dumps(dict(report(name)), indent=1))
