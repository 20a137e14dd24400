"""Compiles the TPU kernels with the real compiler for every chip: `python -m tests.compile.tpu [target …]`.

Prints a line for each target and check, and exits non-zero if one fails. Without targets most checks are spread over
the chips, one chip each; with `v4 v5e v5p v6e tpu7x` every check is put to every chip. A check passes if it compiles,
hands the donated pool back in place and needs hardly any temporary memory. The checks named `broken` are kernels that
must be refused, and for the stated reason; they show that the gate can fail.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import Attention, Runs
from pallas_kernels.hardware import MIB, TPUS, TpuFacts
from pallas_kernels.tpu.attend_tiles import attend_tiles
from pallas_kernels.tpu.block_rule import allowed_sizes
from pallas_kernels.tpu.extent_attention import extent_attention
from pallas_kernels.tpu.extent_stream import ExtentStream
from pallas_kernels.tpu.paged_attention import TILE_LINES, paged_attention
from tests.compile.problems import (
    EVERYWHERE,
    IN_RUNS,
    MILLION,
    PROBLEMS,
    WIDE_SCALES,
    random_checks,
    round_up,
    struct,
)
from tests.compile.spread import spread
from tests.compile.tpu_target import TOPOLOGIES, compile_for

POOL = 1  # the position of the pool among the arguments of every check
TEMPORARY_LIMIT = 8 * MIB  # below a copy of the pool (1 GiB) or of a large table (64 MiB)
LAYERS = 4
LANES = 128


@dataclass(frozen=True)
class Check:
    """A function to compile. `refusal` matches the complaint about a broken one; None means it must compile."""

    name: str
    function: Callable
    shapes: tuple[Any, ...]
    refusal: str | None = None
    everywhere: bool = False  # for every chip, when the others are spread over them


def one_layer(facts: TpuFacts, attention: Attention, q, pool, pages, tiles, page_offset, sinks, scales):
    """A layer's attention over pages or runs; the donated pool goes back as it is."""
    kernel = extent_attention if isinstance(pages, Runs) else paged_attention
    out = kernel(q, pool, pages, tiles, page_offset, attention=attention, sinks=sinks, scales=scales, facts=facts)
    return out, pool


def all_layers(facts: TpuFacts, attention: Attention, q, pool, pages, tiles, page_offset, sinks, scales):
    """A scan over layers, whose offset is traced and whose pool is carried."""
    pages_per_layer = pool.shape[0] // LAYERS

    def layer(carry, index):
        q, pool = carry
        offset = page_offset + index * pages_per_layer
        return one_layer(facts, attention, q, pool, pages, tiles, offset, sinks, scales), None

    return lax.scan(layer, (q, pool), jnp.arange(LAYERS))[0]


def table_in_scalar_memory(q, pool, pages, *rest):
    """What the kernel must not do: the whole page table as a scalar operand."""

    def kernel(pages, out):
        out[...] = jnp.full(out.shape, pages[0, 0], out.dtype)

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(1,), in_specs=[], out_specs=pl.BlockSpec((8, 128), lambda i, _: (0, 0))
    )
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.int32))(pages), pool


def buffer_beyond_vector_memory(q, pool, *rest):
    """A page copied into 256 MiB of vector memory, which no chip has."""
    page = jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype)
    pages = 256 * MIB // (page.size * page.dtype.itemsize)

    def kernel(pool, out, buffer):
        pltpu.sync_copy(pool.at[0], buffer.at[0])
        out[...] = buffer[0]

    scratch = [pltpu.VMEM((pages, *page.shape), page.dtype)]
    call = pl.pallas_call(
        kernel, in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)], out_shape=page, scratch_shapes=scratch
    )
    return call(pool), pool


def interleaved_rows_at_once(facts: TpuFacts, attention: Attention, q, pool, runs, *rest):
    """What the kernel over runs must not do: one copy for the rows of scales of several pages, in tiles of 8 rows."""

    class AllAtOnce(ExtentStream):
        @staticmethod
        def pages_are_adjacent(source):
            return True

    tiles, page_offset, sinks, scales = rest
    out = attend_tiles(
        q,
        pool,
        (runs.starts, runs.ends),
        (runs.num_runs,),
        tiles,
        page_offset,
        stream=AllAtOnce,
        attention=attention,
        sinks=sinks,
        scales=scales,
        facts=facts,
        pages_per_block=None,
        interpret=False,
        name="all_at_once",
    )
    return out, pool


def page_of_odd_width(q, pool, *rest):
    """What the layout avoids: pages whose lanes are no multiple of 128, which XLA copies into a padded pool."""

    def kernel(pool, page):
        pltpu.sync_copy(pool.at[0], page)

    page = jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype)
    return pl.pallas_call(kernel, in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)], out_shape=page)(pool), pool


def checks(facts: TpuFacts) -> Iterator[Check]:
    """All checks for one chip."""
    chosen = ((str(problem), problem, facts) for problem in PROBLEMS)
    for name, problem, chip in (*chosen, *random_checks(facts, TILE_LINES, allowed_sizes)):
        attend = partial(one_layer, chip, problem.attention)
        shapes = problem.shapes(LANES)
        yield Check(f"paged_attention {name}", attend, shapes, everywhere=problem in EVERYWHERE)
    for problem in IN_RUNS:
        attend = partial(one_layer, facts, problem.attention)
        shapes = problem.shapes_in_runs(LANES)
        yield Check(f"extent_attention {problem}", attend, shapes, everywhere=problem in EVERYWHERE)
    large = MILLION.shapes(LANES)
    scanned = partial(all_layers, facts, MILLION.attention)
    yield Check(f"paged_attention {MILLION}, scanned over {LAYERS} layers", scanned, large)

    yield Check("broken: a buffer beyond vector memory", buffer_beyond_vector_memory, large, "(?i)vmem")
    yield Check("broken: the page table in scalar memory", table_in_scalar_memory, large, "(?i)smem")
    odd = struct((2**15, 3, 16, 160), jnp.bfloat16)
    wide = WIDE_SCALES.shapes_in_runs(LANES)
    at_once = partial(interleaved_rows_at_once, facts, WIDE_SCALES.attention)
    yield Check("broken: interleaved rows of scales in one copy", at_once, wide, "must be aligned to tiles")
    yield Check("broken: pages of 160 lanes", page_of_odd_width, (large[0], odd), "temporary bytes")


def complaint(alias_bytes: int, temporary_bytes: int, shapes: tuple[Any, ...]) -> str | None:
    """What is wrong with the memory of a compiled check, or None."""
    q, pool = shapes[:2]
    pool_bytes = pool.size * pool.dtype.itemsize
    if alias_bytes < pool_bytes:
        return f"only {alias_bytes:,} bytes are aliased, the pool has {pool_bytes:,}"
    # Queries and answers change their order, twice where two cores' answers are joined, and their lanes are padded.
    lanes = round_up(q.shape[3], LANES) + round_up(pool.shape[3] - q.shape[3], LANES)
    limit = TEMPORARY_LIMIT + 2 * 4 * math.prod(q.shape[:3]) * lanes
    if temporary_bytes > limit:
        return f"{temporary_bytes:,} temporary bytes, the limit is {limit:,}"
    return None


def passes(target: str, check: Check) -> bool:
    """Compiles a check, prints its line and says whether it did what it should."""
    started = time.perf_counter()
    alias_bytes = temporary_bytes = 0
    try:
        memory = compile_for(target, check.function, *check.shapes, donate=(POOL,)).memory_analysis()
        assert memory is not None, "the compiler tells nothing about memory"
        alias_bytes, temporary_bytes = memory.alias_size_in_bytes, memory.temp_size_in_bytes
        wrong = complaint(alias_bytes, temporary_bytes, check.shapes)
    except Exception as error:  # whatever the compiler raises is the verdict that is printed
        wrong = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started

    ok = wrong is None if check.refusal is None else bool(wrong and re.search(check.refusal, wrong))
    word = "FAILED" if not ok else "refused" if check.refusal else "ok"
    print(f"{target:6} {word:8}{seconds:6.2f} s {alias_bytes:>13,} alias {temporary_bytes:>9,} temp  {check.name}")
    if not ok:
        print(f"       {wrong or 'compiled, but had to be refused'}")
    sys.stdout.flush()
    return ok


def main(targets: list[str]) -> int:
    if unknown := set(targets) - set(TOPOLOGIES):
        print(f"unknown target {', '.join(unknown)}; choose from {', '.join(TOPOLOGIES)}", file=sys.stderr)
        return 2
    results = [passes(target, check) for target, check in spread(checks, TPUS, targets)]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
