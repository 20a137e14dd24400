"""The paged attentions that both compile gates put to their compilers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import (
    HEAD_DIMS,
    PAGE_SIZES,
    QUANTISED_DTYPES,
    QUERY_DTYPES,
    Attention,
    Runs,
    Scales,
    Tiles,
)
from pallas_kernels.hardware import GpuFacts, TpuFacts
from pallas_kernels.tuned import AttentionShape, Tuned, with_tuned

struct = jax.ShapeDtypeStruct


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

    def shapes(self, lane_multiple: int) -> tuple[Any, ...]:
        """q, pool, pages, tiles, page_offset, sinks, scales. Lanes are rounded up to `lane_multiple`."""
        q_heads, kv_heads = map(int, self.heads.split(":"))
        lanes = round_up(self.key_dim + (self.value_dim or self.key_dim), lane_multiple)
        stored = jnp.dtype(self.pool_dtype or self.dtype)
        total_pages = 2**30 // (kv_heads * self.page_size * lanes * stored.itemsize)
        scale = None
        if self.pool_dtype:
            scale_lanes = round_up(kv_heads * self.page_size, lane_multiple)
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

    def shapes_in_runs(self, lane_multiple: int) -> tuple[Any, ...]:
        """The same with runs in place of pages, as many of them as there are pages at worst."""
        q, pool, pages, *rest = self.shapes(lane_multiple)
        return q, pool, Runs(pages, pages, struct(pages.shape[:1], jnp.int32)), *rest

    def shapes_in_spans(self) -> tuple[Any, ...]:
        """The same with a span a row: q, memory, tiles, start, sinks, scales. A record holds two layers."""
        q, pool, _, tiles, start, sinks, scales = self.shapes(1)
        record = round_up(2 * pool.shape[1] * pool.shape[3] * pool.dtype.itemsize, 128) // pool.dtype.itemsize
        memory = struct((self.tiles, round_up(self.context, 64), record), pool.dtype)
        return q, memory, tiles, start, sinks, scales

    @property
    def shape(self) -> AttentionShape:
        """What the kernels look up sizes by."""
        q_heads, kv_heads = map(int, self.heads.split(":"))
        lines, value_dim = self.tokens * (q_heads // kv_heads), self.value_dim or self.key_dim
        per_token = 2 if self.pool_dtype and self.scales == "token" else 0
        dtypes = self.dtype, self.pool_dtype or self.dtype
        return AttentionShape(kv_heads, lines, self.key_dim, value_dim, self.page_size, *dtypes, per_token)

    def __str__(self) -> str:
        """What differs from the defaults."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return " ".join(f"{name} {value}" for name, value in changed.items()) or "32:8x128 bfloat16 page 16 batch 16"


MILLION = Problem(tiles=256, context=2**20)
WIDE_SCALES = Problem(pool_dtype="float8_e4m3fn", scales="token", page_size=32)  # a row of them a page, of 256 lanes
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
    WIDE_SCALES,
    Problem(pool_dtype="float8_e4m3fn", scales="head", page_size=128),
    Problem(pool_dtype="float8_e5m2", dtype="float32", scales="token", page_size=64),
    Problem(pool_dtype="float8_e5m2", dtype="float16"),
    Problem(tokens=8),
    Problem(tokens=32),
    Problem(heads="9:3", key_dim=64, tokens=42, window=512, kept=4, soft_cap=30.0, sinks=True),
    Problem(tokens=6, pool_dtype="int8", scales="token", window=100, kept=20, soft_cap=5.0, sinks=True),
    Problem(heads="8:2", key_dim=192, value_dim=128, pool_dtype="int8", scales="token", tokens=8, window=100, kept=4),
    MILLION,
)
EVERYWHERE = (PROBLEMS[0], PROBLEMS[1], MILLION)  # what every chip is asked, where others are spread over them
# What kernels over runs are asked: streams differ in how they copy, not in what is computed.
IN_RUNS = (
    *EVERYWHERE,
    WIDE_SCALES,
    Problem(heads="9:3", key_dim=64, page_size=32, tiles=1024),
    Problem(tokens=6, pool_dtype="int8", scales="token", window=100, kept=20, soft_cap=5.0, sinks=True),
)
# What the kernel over spans is asked; a row's span of the last is 137 GB of addresses.
IN_SPANS = (
    Problem(),
    Problem(heads="9:3", key_dim=64, tokens=8, window=512, kept=4, soft_cap=30.0, sinks=True),
    Problem(dtype="float32"),
    Problem(heads="8:1", key_dim=80),
    Problem(heads="16:16", key_dim=192, value_dim=128),
    Problem(heads="8:2", key_dim=256, dtype="float16"),
    Problem(pool_dtype="int8", scales="head"),
    Problem(pool_dtype="float8_e4m3fn", heads="4:2", key_dim=112),
    Problem(heads="256:128", key_dim=256, tiles=64, context=2**20),
)
RANDOM_PROBLEMS = 6  # for each target, the same ones every time


def random_problem(random: Random, most_lines: int) -> Problem:
    """Shapes that nobody chose, with tiles of up to `most_lines`: the rules for block sizes must find what compiles."""
    kv_heads = random.choice((1, 2, 3, 4, 8, 16))
    group = random.choice((1, 2, 3, 4, 7, 8))
    dtype = random.choice(QUERY_DTYPES)
    pool_dtype = random.choice((*QUANTISED_DTYPES, *([] if dtype == "float16" else [None] * 3)))
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
        tokens=random.randint(1, most_lines // group),
        window=window,
        kept=random.choice((0, 4)) if window else 0,
        soft_cap=random.choice((None, 30.0)),
        sinks=random.choice((False, True)),
    )


def random_checks[Facts: TpuFacts | GpuFacts](
    facts: Facts, most_lines: int, allowed_sizes: Callable[[AttentionShape, Facts], list[dict[str, int]]]
) -> Iterator[tuple[str, Problem, Facts]]:
    """(name, problem, chip): random problems, of which every other one gets sizes at random too.

    Any that the rule allows must compile, for the tuner tries them and a file may ask for them.
    """
    random = Random(facts.name)
    for index in range(RANDOM_PROBLEMS):
        problem = random_problem(random, most_lines)
        if index % 2 == 0:
            yield str(problem), problem, facts
            continue
        sizes = random.choice(allowed_sizes(problem.shape, facts))
        tuned = Tuned(facts.name, problem.shape, tuple(sizes.items()))
        yield f"{problem} with {sizes}", problem, with_tuned(facts, [tuned])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
