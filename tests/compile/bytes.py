"""Compiles the kernels that move cached bytes with the real compilers.

    python -m tests.compile.bytes tpu|gpu [target …]

Without targets most checks are spread over the TPUs, one chip each; for those that are named every check is compiled.
Prints a line for each target and check, and exits non-zero if one fails. A check passes if it compiles, hands every
donated array back in place and needs hardly any temporary memory; on GPU it must also spill no register. The checks
named `broken` are programs that must be refused, and for the stated reason; they show that the gate can fail.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import HEAD_DIMS, QUANTISED_DTYPES
from pallas_kernels.hardware import GPUS, H200, MIB, TPUS, GpuFacts, TpuFacts
from pallas_kernels.pages import copy_pages, gather_pages, scrub_pages, write_pages
from tests.compile.spread import spread

POOL_BYTES = 256 * MIB  # or a little less
TEMPORARY_LIMIT = 32 * MIB  # above lists and the new tokens, far below a pool
LAYERS = 4
PACKED, COPIES = 256, 64
BULK_COPY = r"cp\.async\.bulk\.(?:tensor|shared|global)"  # in PTX; scalars are page numbers and scales
VECTOR_ACCESS = r"\b(?:ld|st)\.global\S*\.v[248]"

Shape = jax.ShapeDtypeStruct
Facts = TpuFacts | GpuFacts


@dataclass(frozen=True)
class Check:
    """A function of donated arrays and others. `refusal` matches the complaint about a broken one."""

    name: str
    function: Callable
    donated: tuple[Shape, ...]
    others: tuple[Shape, ...]
    refusal: str | None = None
    everywhere: bool = False  # for every chip, when the others are spread over them


def pool_of(facts: Facts, kv_heads: int, head_dim: int, page_size: int, dtype: str) -> Shape:
    """A pool of LAYERS layers; on TPU its lanes are rounded up to whole columns."""
    lanes = 2 * head_dim
    if isinstance(facts, TpuFacts):
        lanes = -(-lanes // 128) * 128
    page_bytes = kv_heads * page_size * lanes * jnp.dtype(dtype).itemsize
    return Shape((POOL_BYTES // (LAYERS * page_bytes) * LAYERS, kv_heads, page_size, lanes), dtype)


def append_on(facts: Facts, donated: tuple, page: Any, offset: Any, *rest: Any) -> tuple:
    """Appends to donated[0]; to scales a token too, where they are donated, else with the scales at the end of rest."""
    if isinstance(facts, TpuFacts):
        from pallas_kernels.tpu.append import append
    else:
        from pallas_kernels.gpu.append import append  # type: ignore[assignment]
    pool, *scales = donated
    tensors, scales = rest[:2], (*scales, *rest[2:]) or None
    pool, scales = append(pool, page, offset, tensors, scales=scales, facts=facts)
    return (pool, *(scales or ()))[: len(donated)]


def append_check(facts: Facts, kv_heads: int, head_dim: int, page_size: int, dtype: str, scales: str = "none") -> Check:
    """`scales`: none, tensor, head or token."""
    pool = pool_of(facts, kv_heads, head_dim, page_size, dtype)
    scale_lanes = -(-kv_heads * page_size // 128) * 128
    of_token = (Shape((pool.shape[0], scale_lanes), "float32"),) * 2 if scales == "token" else ()
    fixed = {"tensor": (Shape((), "float32"),) * 2, "head": (Shape((kv_heads,), "float32"),) * 2}.get(scales, ())
    numbers, new = Shape((PACKED,), "int32"), Shape((PACKED, kv_heads, head_dim), "bfloat16")
    name = f"append {kv_heads}x{head_dim} {dtype} page {page_size}, scales: {scales}"
    return Check(name, partial(append_on, facts), (pool, *of_token), (numbers, numbers, new, new, *fixed))


def move_checks(facts: Facts, pool: Shape) -> Iterator[Check]:
    """The four things done to whole pages, on one pool."""
    pages = Shape((COPIES,), "int32")
    images = Shape((LAYERS, COPIES, *pool.shape[1:]), pool.dtype)
    num_pages = pool.shape[0] // LAYERS
    known = {"num_pages": num_pages, "facts": facts}
    what = f"{'x'.join(map(str, pool.shape[1:]))} {pool.dtype}"

    def op(function: Callable, donated: tuple, *rest: Any) -> tuple:
        return (function(*donated, *rest, **known),)

    def gather(donated: tuple, pool: Any, pages: Any) -> tuple:
        return (gather_pages(pool, pages, **known),)

    yield Check(f"copy_pages {what}", partial(op, copy_pages), (pool,), (pages, pages))
    yield Check(f"write_pages {what}", partial(op, write_pages), (pool,), (pages, images))
    yield Check(f"scrub_pages {what}", partial(op, scrub_pages), (pool,), (pages,))
    yield Check(f"gather_pages {what}", gather, (), (pool, pages))


def computed_pool(facts: Facts, donated: tuple, *rest: Any) -> tuple:
    """What a caller must not do: hand the kernel a pool while the old one is still wanted."""
    (pool,) = append_on(facts, donated, *rest)
    return (pool + donated[0],)


def one_token_at_a_time(donated: tuple, page: Any, offset: Any, *_: Any) -> tuple:
    """What the strips avoid: a copy of one token into a head-major page."""

    def kernel(page, offset, new, before, pool):
        pltpu.sync_copy(new, pool.at[page[0], :, pl.ds(offset[0], 1)])

    (pool,) = donated
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, in_specs=[in_hbm, in_hbm], out_specs=in_hbm)
    new = jnp.zeros((pool.shape[1], 1, pool.shape[3]), pool.dtype)
    call = pl.pallas_call(kernel, grid_spec=grid, out_shape=Shape(pool.shape, pool.dtype), input_output_aliases={3: 0})
    return (call(page, offset, new, pool),)


def checks(facts: Facts) -> Iterator[Check]:
    """All checks for one chip. No GPU kernel comes twice, since a process compiles one once and then remembers it."""
    if isinstance(facts, GpuFacts) and facts is not H200:  # which differs from other Hoppers in its memory alone
        yield append_check(facts, 4, 128, 16, "bfloat16")
        yield from move_checks(facts, pool_of(facts, 4, 128, 16, "bfloat16"))
        return
    on_gpu = isinstance(facts, GpuFacts)
    plain = ("bfloat16", "float32", "float16") if on_gpu else ("bfloat16", "float32")
    for dtype in plain:
        yield replace(append_check(facts, 8, 128, 16, dtype), everywhere=True)
    for dtype in QUANTISED_DTYPES:
        yield append_check(facts, 8, 128, 16, dtype, "token")
    yield append_check(facts, 8, 128, 128, "int8", "head")
    yield append_check(facts, 1, 64, 32, "float8_e4m3fn", "tensor")
    page_sizes = (16, 32, 64, 128)
    for index, head_dim in enumerate(HEAD_DIMS):
        yield append_check(facts, 3, head_dim, page_sizes[index % 4], "bfloat16")
        yield append_check(facts, 2, head_dim, page_sizes[(index + 1) % 4], "float8_e5m2", "token")
    yield append_check(facts, 32, 128, 16, "bfloat16")

    for dtype in (*plain, *QUANTISED_DTYPES):
        yield from move_checks(facts, pool_of(facts, 8, 128, 16, dtype))
    yield from move_checks(facts, pool_of(facts, 32, 256, 128, "bfloat16"))
    yield from move_checks(facts, Shape((LAYERS * 2**16, 128), "float32"))  # scales a token

    small = append_check(facts, 9, 64, 16, "bfloat16")
    broken = partial(computed_pool, facts)
    yield Check("broken: the pool wanted afterwards", broken, small.donated, small.others, "temporary bytes|aliased")
    if not on_gpu:
        yield Check("broken: one token at a time", one_token_at_a_time, small.donated, small.others, "(?i)align")
        half = append_check(facts, 9, 64, 16, "float16")
        yield Check("broken: float16", half.function, half.donated, half.others, "take no float16")


def complaint(donated: tuple[Shape, ...], memory: Any) -> str | None:
    """What is wrong with the memory of a compiled check, or None."""
    donated_bytes = sum(array.size * array.dtype.itemsize for array in donated)
    if memory.alias_size_in_bytes < donated_bytes:
        return f"only {memory.alias_size_in_bytes:,} bytes are aliased, {donated_bytes:,} are donated"
    if memory.temp_size_in_bytes > TEMPORARY_LIMIT:
        return f"{memory.temp_size_in_bytes:,} temporary bytes, the limit is {TEMPORARY_LIMIT:,}"
    return None


def compile_on_tpu(target: str, check: Check) -> tuple[str | None, str]:
    """(what is wrong, figures)."""
    from tests.compile.tpu_target import compile_for

    memory = compile_for(target, check.function, check.donated, *check.others, donate=(0,)).memory_analysis()
    return complaint(check.donated, memory), _figures(memory)


def compile_on_gpu(target: str, check: Check) -> tuple[str | None, str]:
    """(what is wrong, figures)."""
    from tests.compile.gpu_target import compile_for, mosaic_kernels

    with mosaic_kernels() as kernels:
        compiled = compile_for(target, check.function, check.donated, *check.others, donate=(0,))
    memory = compiled.memory_analysis()
    spills = sum(kernel.spill_bytes for kernel in kernels)
    registers = max((kernel.registers for kernel in kernels), default=0)
    bulk, vectors = (sum(len(re.findall(p, kernel.ptx)) for kernel in kernels) for p in (BULK_COPY, VECTOR_ACCESS))
    wrong = complaint(check.donated, memory)
    if not kernels or any(".target sm_90a" not in kernel.ptx for kernel in kernels):
        wrong = f"{len(kernels)} Mosaic kernels for sm_90a were compiled"
    elif spills:
        wrong = f"{spills:,} bytes spilled"
    elif not bulk:
        wrong = "no bulk copies in the machine code"
    elif vectors:
        wrong = f"{vectors} vector loads or stores beside the bulk copies"
    return wrong, f"{_figures(memory)} {registers:>3} registers {bulk:>2} bulk copies"


def _figures(memory: Any) -> str:
    return f"{memory.alias_size_in_bytes:>13,} alias {memory.temp_size_in_bytes:>11,} temp"


def passes(target: str, check: Check, compile_check: Callable[[str, Check], tuple[str | None, str]]) -> bool:
    """Compiles a check, prints its line and says whether it did what it should."""
    started = time.perf_counter()
    figures = ""
    try:
        wrong, figures = compile_check(target, check)
    except Exception as error:  # whatever the compilers raise is the verdict that is printed
        wrong = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - started
    ok = wrong is None if check.refusal is None else bool(wrong and re.search(check.refusal, wrong))
    word = "FAILED" if not ok else "refused" if check.refusal else "ok"
    print(f"{target:6} {word:8}{seconds:6.2f} s {figures}  {check.name}")
    if not ok:
        print(f"       {wrong or 'compiled, but had to be refused'}")
    sys.stdout.flush()
    return ok


def main(platform: str, *targets: str) -> int:
    chips: dict[str, Any]
    if platform == "tpu":
        chips, compile_check = TPUS, compile_on_tpu
    elif platform == "gpu":
        chips, compile_check = GPUS, compile_on_gpu
    else:
        raise SystemExit(f"platform {platform!r} is unknown; use tpu or gpu")
    if unknown := set(targets) - set(chips):
        raise SystemExit(f"unknown target {', '.join(unknown)}; choose from {', '.join(chips)}")
    spread_over = spread(checks, chips, targets or list(chips) if platform == "gpu" else targets)
    results = [passes(name, check, compile_check) for name, check in spread_over]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
