"""Compiles the GPU kernels with the real compilers for Hopper GPUs: `python -m tests.compile.gpu [target …]`.

Prints a line for each target and check, and exits non-zero if one fails. A check passes if it compiles for sm_90a,
spills no register, hands the donated pool back in place and needs hardly any temporary memory; and if its machine code
uses the tensor cores in bfloat16 and float16 and does not in float32, where they would round to TF32. The checks named
`broken` are kernels that must be refused, and for the stated reason; they show that the gate can fail.
"""

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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.block_rule import allowed_sizes
from pallas_kernels.gpu.layouts import tiled
from pallas_kernels.gpu.paged_attention import TILE_LINES, paged_attention
from pallas_kernels.gpu.span_attention import span_attention
from pallas_kernels.hardware import GPUS, H200, KIB, MIB, GpuFacts
from tests.compile.gpu_target import MosaicKernel, compile_for, device, mosaic_kernels
from tests.compile.problems import IN_SPANS, PROBLEMS, Problem, random_checks

POOL = 1  # the position of the pool among the arguments of every check
TEMPORARY_LIMIT = 32 * MIB  # above padded copies of q and partial answers, below one of the pool or the large table
LAYERS = 4
TENSOR_CORE_INSTRUCTION = re.compile(r"\b[HQIBD]G?MMA\.\d+")  # HGMMA.64x64x16…, HMMA.16816…; not HFMA2.MMA


@dataclass(frozen=True)
class Check:
    """A function to compile. `refusal` matches the complaint about a broken one; None means it must compile."""

    name: str
    function: Callable
    shapes: tuple[Any, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What the compilers made of a check; `wrong` is what is wrong with it, or None."""

    wrong: str | None
    registers: int = 0
    spill_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0


def one_layer(facts: GpuFacts, attention: Attention, q, pool, pages, tiles, page_offset, sinks, scales):
    """A layer's attention; the donated pool goes back as it is."""
    out = paged_attention(
        q, pool, pages, tiles, page_offset, attention=attention, sinks=sinks, scales=scales, facts=facts
    )
    return out, pool


def over_spans(facts: GpuFacts, problem: Problem, q, memory, tiles, start, sinks, scales):
    """A layer's attention over spans; the donated memory goes back as it is."""
    _, kv_heads = map(int, problem.heads.split(":"))
    options = {"kv_heads": kv_heads, "attention": problem.attention, "sinks": sinks, "scales": scales}
    return span_attention(q, memory, tiles, start, facts=facts, **options), memory


def copy_of_the_memory(facts: GpuFacts, problem: Problem, q, memory, *rest):
    """What a caller must not do: hand the kernel memory that was computed."""
    return over_spans(facts, problem, q, -memory, *rest)[0], memory


def all_layers(facts: GpuFacts, attention: Attention, q, pool, pages, tiles, page_offset, sinks, scales):
    """A scan over layers, whose offset is traced and whose pool is carried."""
    pages_per_layer = pool.shape[0] // LAYERS

    def layer(carry, index):
        q, pool = carry
        offset = page_offset + index * pages_per_layer
        return one_layer(facts, attention, q, pool, pages, tiles, offset, sinks, scales), None

    return lax.scan(layer, (q, pool), jnp.arange(LAYERS))[0]


def copy_of_the_pool(facts: GpuFacts, attention: Attention, q, pool, *rest):
    """What a caller must not do: hand the kernel a pool that was computed."""
    return one_layer(facts, attention, q, -pool, *rest)[0], pool


def more_registers_than_there_are(q, pool, *rest):
    """Keeps 384 float32 values for each thread, which has 255 registers."""

    def body(q, out):
        first, second = (jnp.exp(q[i].astype(jnp.float32)) for i in range(2))
        out[0] = (first + second.sum()).astype(out.dtype)
        out[1] = (second + first.sum()).astype(out.dtype)

    wide = jnp.broadcast_to(q.reshape(-1)[:1], (2, 128, 192))
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(wide.shape, q.dtype))(wide), pool


def more_shared_memory_than_there_is(q, pool, *rest):
    """Asks for 256 KiB of shared memory, where a thread block may have 227."""

    def body(pool, out, buffer, arrived):
        plgpu.copy_gmem_to_smem(pool.at[0, 0], buffer.at[0], arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(buffer.at[0], out)
        plgpu.wait_smem_to_gmem(0)

    page = jax.ShapeDtypeStruct(pool.shape[2:], pool.dtype)
    pages = 256 * KIB // (page.size * page.dtype.itemsize)
    scratch = (plgpu.SMEM((pages, *page.shape), page.dtype), plgpu.Barrier())
    return plgpu.kernel(body, out_type=page, scratch_types=scratch)(pool), pool


def float32_on_the_tensor_cores(q, pool, *rest):
    """A float32 product by WGMMA, which rounds its operands to TF32."""

    def body(pool, out, a, arrived):
        plgpu.copy_gmem_to_smem(pool.at[0, 0], a, arrived)
        plgpu.barrier_wait(arrived)

        def multiply(accumulator):
            plgpu.wgmma(accumulator, a, a.transpose((1, 0)))
            return accumulator[...]

        out[...] = pl.run_scoped(multiply, plgpu.ACC(out.shape, jnp.float32))

    _, _, page_size, lanes = pool.shape
    out = jax.ShapeDtypeStruct((page_size, page_size), pool.dtype)
    scratch = (tiled((page_size, lanes), pool.dtype, lanes), plgpu.Barrier())
    return plgpu.kernel(body, out_type=out, scratch_types=scratch)(pool), pool


def checks(facts: GpuFacts) -> Iterator[Check]:
    """All checks for one GPU. No kernel comes twice, since a process compiles a kernel once and then remembers it."""

    def check(problem: Problem) -> Check:
        return Check(f"paged_attention {problem}", partial(one_layer, facts, problem.attention), problem.shapes(1))

    if facts is not H200:  # which differs from other Hoppers in its memory alone
        yield check(Problem(tiles=64))
        yield check(Problem(tiles=64, dtype="float32"))
        return

    for problem in PROBLEMS:
        yield check(problem)
    for name, problem, chip in random_checks(facts, TILE_LINES, allowed_sizes):
        attend = partial(one_layer, chip, problem.attention)
        yield Check(f"paged_attention {name}", attend, problem.shapes(1))
    for problem in IN_SPANS:
        attend = partial(over_spans, facts, problem)
        yield Check(f"span_attention {problem}", attend, problem.shapes_in_spans())
    scanned = Problem(tiles=128, context=2**20)
    layers = partial(all_layers, facts, scanned.attention)
    yield Check(f"paged_attention {scanned}, scanned over {LAYERS} layers", layers, scanned.shapes(1))

    small = Problem(heads="9:3", key_dim=64, page_size=64, context=1024).shapes(1)
    copied = partial(copy_of_the_pool, facts, Problem(key_dim=64).attention)
    yield Check("broken: registers spilled", more_registers_than_there_are, small, "bytes spilled")
    yield Check("broken: too much shared memory", more_shared_memory_than_there_is, small, "(?i)(smem|shared memory)")
    yield Check("broken: the pool copied", copied, small, "temporary bytes")
    spans = Problem(heads="9:3", key_dim=64)
    copied = partial(copy_of_the_memory, facts, spans)
    yield Check("broken: the spans copied", copied, spans.shapes_in_spans(), "temporary bytes")
    exact = Problem(heads="9:3", key_dim=64, dtype="float32", page_size=64, context=1024).shapes(1)
    yield Check("broken: float32 on the tensor cores", float32_on_the_tensor_cores, exact, "tensor cores")


def verdict(check: Check, kernels: list[MosaicKernel], alias_bytes: int, temporary_bytes: int) -> Outcome:
    """Judges a check that compiled."""
    q, pool = check.shapes[:2]
    pool_bytes = pool.size * pool.dtype.itemsize
    spill_bytes = sum(kernel.spill_bytes for kernel in kernels)
    tensor_cores = any(TENSOR_CORE_INSTRUCTION.search(kernel.sass) for kernel in kernels)
    wrong = None
    if len(kernels) != 1 or ".target sm_90a" not in kernels[0].ptx:
        wrong = f"{len(kernels)} Mosaic kernels for sm_90a were compiled, not one"
    elif spill_bytes:
        wrong = f"{spill_bytes:,} bytes spilled"
    elif tensor_cores != (q.dtype != jnp.float32):
        wrong = f"the machine code {'uses' if tensor_cores else 'does not use'} the tensor cores in {q.dtype}"
    elif alias_bytes < pool_bytes:
        wrong = f"only {alias_bytes:,} bytes are aliased, the pool has {pool_bytes:,}"
    elif temporary_bytes > (limit := TEMPORARY_LIMIT + 32 * q.size):
        wrong = f"{temporary_bytes:,} temporary bytes, the limit is {limit:,}"
    return Outcome(wrong, max((k.registers for k in kernels), default=0), spill_bytes, alias_bytes, temporary_bytes)


def outcome(target: str, check: Check) -> Outcome:
    """Compiles a check and judges it."""
    try:
        with mosaic_kernels() as kernels:
            compiled = compile_for(target, check.function, *check.shapes, donate=(POOL,))
        memory = compiled.memory_analysis()
        assert memory is not None, "the compiler tells nothing about memory"
        return verdict(check, kernels, memory.alias_size_in_bytes, memory.temp_size_in_bytes)
    except Exception as error:  # whatever the compilers raise is the verdict that is printed
        return Outcome(f"{type(error).__name__}: {error}")


def passes(target: str, check: Check) -> bool:
    """Compiles a check, prints its line and says whether it did what it should."""
    started = time.perf_counter()
    found = outcome(target, check)
    seconds = time.perf_counter() - started
    if check.refusal is None:
        ok = found.wrong is None
    else:
        ok = found.wrong is not None and re.search(check.refusal, found.wrong) is not None
    word = "FAILED" if not ok else "refused" if check.refusal else "ok"
    print(
        f"{target:5} {word:8}{seconds:6.2f} s {found.registers:>4} registers {found.spill_bytes:>5} spilled "
        f"{found.alias_bytes:>13,} alias {found.temporary_bytes:>11,} temp  {check.name}"
    )
    if not ok:
        print(f"       {found.wrong or 'compiled, but had to be refused'}")
    sys.stdout.flush()
    return ok


def main(targets: list[str]) -> int:
    if unknown := set(targets) - set(GPUS):
        print(f"unknown target {', '.join(unknown)}; choose from {', '.join(GPUS)}", file=sys.stderr)
        return 2
    for target in targets:
        device(target)  # raises here, not once a check, if the compilers are missing
    results = [passes(target, check) for target in targets for check in checks(GPUS[target])]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(GPUS)))
