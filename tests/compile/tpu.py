"""Compiles the TPU kernels with the real compiler for every chip: `python -m tests.compile.tpu [target …]`.

Prints a line for each target and check, and exits non-zero if one fails. A check passes if it compiles, hands the
donated pool back in place and needs hardly any temporary memory. The checks named `broken` are kernels that must be
refused, and for the stated reason; they show that the gate can fail.
"""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arguments import (
    HEAD_DIMS,
    PAGE_SIZES,
    QUANTISED_DTYPES,
    QUERY_DTYPES,
    Attention,
    Scales,
    Tiles,
)
from pallas_kernels.hardware import MIB, TPUS, TpuFacts
from pallas_kernels.tpu.paged_attention import TILE_LINES, paged_attention
from tests.compile.tpu_target import TOPOLOGIES, compile_for

POOL = 1  # the position of the pool among the arguments of every check
TEMPORARY_LIMIT = 8 * MIB  # below a copy of the pool (1 GiB) or of a large table (64 MiB)
LAYERS = 4

struct = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Check:
    """A function to compile. `refusal` matches the complaint about a broken one; None means it must compile."""

    name: str
    function: Callable
    shapes: tuple[Any, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class Problem:
    """The shapes of one paged attention. The pool has 1 GiB, whatever its dtype."""

    heads: str = "32:8"
    key_dim: int = 128
    value_dim: int | None = None
    dtype: str = "bfloat16"
    pool_dtype: str | None = None
    scales: str = "tensor"  # of a quantised pool: per tensor, head or token
    page_size: int = 16
    tiles: int = 16
    tokens: int = 1
    context: int = 16_384
    window: int | None = None
    kept: int = 0
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def attention(self) -> Attention:
        return Attention(self.value_dim or self.key_dim, 0.1, self.window, self.kept, self.soft_cap)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """q, pool, pages, tiles, page_offset, sinks, scales."""
        q_heads, kv_heads = map(int, self.heads.split(":"))
        lanes = round_up(self.key_dim + (self.value_dim or self.key_dim), 128)
        stored = jnp.dtype(self.pool_dtype or self.dtype)
        total_pages = 2**30 // (kv_heads * self.page_size * lanes * stored.itemsize)
        scale = None
        if self.pool_dtype:
            scale_lanes = round_up(kv_heads * self.page_size, 128)
            shape = {"tensor": (), "head": (kv_heads,), "token": (total_pages, scale_lanes)}[self.scales]
            scale = struct(shape, jnp.float32)
        return (
            struct((self.tiles, self.tokens, q_heads, self.key_dim), self.dtype),
            struct((total_pages, kv_heads, self.page_size, lanes), stored),
            struct((self.tiles, self.context // self.page_size), jnp.int32),
            Tiles(*[struct((self.tiles,), jnp.int32)] * 3),
            struct((), jnp.int32),
            struct((q_heads,), jnp.float32) if self.sinks else None,
            None if scale is None else Scales(scale, scale),
        )

    def __str__(self) -> str:
        """What differs from the defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name} {value}" for name, value in changed.items()) or "32:8x128 bfloat16 page 16 batch 16"


def one_layer(facts: TpuFacts, attention: Attention, q, pool, pages, tiles, page_offset, sinks, scales):
    """A layer's attention; the donated pool goes back as it is."""
    out = paged_attention(
        q, pool, pages, tiles, page_offset, attention=attention, sinks=sinks, scales=scales, facts=facts
    )
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


def page_of_odd_width(q, pool, *rest):
    """What the layout avoids: pages whose lanes are no multiple of 128, which XLA copies into a padded pool."""

    def kernel(pool, page):
        pltpu.sync_copy(pool.at[0], page)

    page = jax.ShapeDtypeStruct(pool.shape[1:], pool.dtype)
    return pl.pallas_call(kernel, in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)], out_shape=page)(pool), pool


MILLION = Problem(tiles=256, context=2**20)
PROBLEMS = (
    Problem(),
    Problem(page_size=128),
    Problem(page_size=32, tiles=1024),
    Problem(heads="9:3", key_dim=64, tiles=256),
    Problem(heads="1:1", key_dim=64, context=160, tiles=1),
    Problem(dtype="float32"),
    Problem(heads="8:1", key_dim=80),
    Problem(heads="6:2", key_dim=96, dtype="float32"),
    Problem(heads="4:2", key_dim=112),
    Problem(heads="16:16", key_dim=192, value_dim=128),
    Problem(heads="8:1", key_dim=256, page_size=32),
    Problem(pool_dtype="int8"),
    Problem(pool_dtype="int8", scales="token"),
    Problem(pool_dtype="float8_e4m3fn", scales="token", page_size=32),
    Problem(pool_dtype="float8_e4m3fn", scales="head", page_size=128),
    Problem(pool_dtype="float8_e5m2", dtype="float32", scales="token", page_size=64),
    Problem(pool_dtype="float8_e5m2", dtype="float16"),
    Problem(tokens=8),
    Problem(tokens=32),
    Problem(heads="9:3", key_dim=64, tokens=42, window=512, kept=4, soft_cap=30.0, sinks=True),
    Problem(tokens=6, pool_dtype="int8", scales="token", window=100, kept=20, soft_cap=5.0, sinks=True),
    MILLION,
)
RANDOM_PROBLEMS = 6  # for each target, the same ones every time


def random_problem(random: Random) -> Problem:
    """Shapes that nobody chose: the rule for block sizes must pick something that compiles."""
    kv_heads = random.choice((1, 2, 3, 4, 8, 16))
    group = random.choice((1, 2, 3, 4, 7, 8))
    dtype = random.choice(QUERY_DTYPES)
    pool_dtype = random.choice(QUANTISED_DTYPES + (() if dtype == "float16" else (None, None, None)))
    window = random.choice((None, 1, 200, 5000))
    return Problem(
        heads=f"{kv_heads * group}:{kv_heads}",
        key_dim=random.choice(HEAD_DIMS),
        value_dim=random.choice(HEAD_DIMS),
        dtype=dtype,
        pool_dtype=pool_dtype,
        scales=random.choice(("tensor", "head", "token")),
        page_size=random.choice(PAGE_SIZES),
        tiles=random.choice((1, 7, 64)),
        tokens=random.randint(1, TILE_LINES // group),
        window=window,
        kept=random.choice((0, 4)) if window else 0,
        soft_cap=random.choice((None, 30.0)),
        sinks=random.choice((False, True)),
    )


def checks(facts: TpuFacts) -> Iterator[Check]:
    """All checks for one chip."""
    random = Random(facts.name)
    for problem in (*PROBLEMS, *(random_problem(random) for _ in range(RANDOM_PROBLEMS))):
        yield Check(f"paged_attention {problem}", partial(one_layer, facts, problem.attention), problem.shapes)
    scanned = partial(all_layers, facts, MILLION.attention)
    yield Check(f"paged_attention {MILLION}, scanned over {LAYERS} layers", scanned, MILLION.shapes)

    yield Check("broken: a buffer beyond vector memory", buffer_beyond_vector_memory, MILLION.shapes, "(?i)vmem")
    yield Check("broken: the page table in scalar memory", table_in_scalar_memory, MILLION.shapes, "(?i)smem")
    odd = struct((2**15, 3, 16, 160), jnp.bfloat16)
    yield Check("broken: pages of 160 lanes", page_of_odd_width, (MILLION.shapes[0], odd), "temporary bytes")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def complaint(alias_bytes: int, temporary_bytes: int, shapes: tuple[Any, ...]) -> str | None:
    """What is wrong with the memory of a compiled check, or None."""
    q, pool = shapes[:2]
    pool_bytes = pool.size * pool.dtype.itemsize
    if alias_bytes < pool_bytes:
        return f"only {alias_bytes:,} bytes are aliased, the pool has {pool_bytes:,}"
    # Queries and answers change their order, and their lanes are padded.
    limit = TEMPORARY_LIMIT + 3 * 4 * math.prod(q.shape[:3]) * round_up(q.shape[3], 128)
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
    results = [passes(target, check) for target in targets for check in checks(TPUS[target])]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TOPOLOGIES)))
