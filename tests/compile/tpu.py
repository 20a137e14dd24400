"""Compiles the TPU kernels with the real compiler for every chip: `python -m tests.compile.tpu [target …]`.

Prints a line for each target and check, and exits non-zero if one fails. A check passes if it compiles, hands the
donated pool back in place and needs hardly any temporary memory. The checks named `broken` are kernels that must be
refused, and for the stated reason; they show that the gate can fail.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.hardware import MIB, TPUS, TpuFacts
from pallas_kernels.tpu.paged_decode import paged_decode
from tests.compile.tpu_target import TOPOLOGIES, compile_for

POOL = 1  # the position of the pool among the arguments of every check
TEMPORARY_LIMIT = 8 * MIB  # above copies of q and of the answer, below one of the pool (1 GiB) or large table (64 MiB)
LAYERS = 4


@dataclass(frozen=True)
class Check:
    """A function to compile. `refusal` matches the complaint about a broken one; None means it must compile."""

    name: str
    function: Callable
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    refusal: str | None = None


def decode_shapes(
    heads: str, head_dim: int, dtype: str, page_size: int, queries: int, tokens: int, lanes: int | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of paged_decode: a pool of 1 GiB in bfloat16 or 2 GiB in float32, `tokens` positions a row."""
    q_heads, kv_heads = map(int, heads.split(":"))
    lanes = lanes or 2 * head_dim
    total_pages = 2**29 // (kv_heads * page_size * lanes)
    return (
        jax.ShapeDtypeStruct((queries, q_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((total_pages, kv_heads, page_size, lanes), dtype),
        jax.ShapeDtypeStruct((queries, tokens // page_size), jnp.int32),
        jax.ShapeDtypeStruct((queries,), jnp.int32),
        jax.ShapeDtypeStruct((queries,), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )


def one_layer(facts: TpuFacts, q, pool, *rest):
    """A layer's attention; the donated pool goes back as it is."""
    return paged_decode(q, pool, *rest, value_dim=q.shape[-1], scale=0.1, facts=facts), pool


def all_layers(facts: TpuFacts, q, pool, pages, row, context, page_offset):
    """A scan over layers, whose offset is traced and whose pool is carried."""
    pages_per_layer = pool.shape[0] // LAYERS

    def layer(carry, index):
        q, pool = carry
        return one_layer(facts, q, pool, pages, row, context, page_offset + index * pages_per_layer), None

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


def checks(facts: TpuFacts) -> Iterator[Check]:
    """All checks for one chip."""
    decode = partial(one_layer, facts)
    for heads, head_dim in (("9:3", 64), ("32:8", 128), ("8:1", 128), ("1:1", 64)):
        for dtype in ("bfloat16", "float32"):
            for page_size, queries in ((16, 256), (128, 16)):
                shapes = decode_shapes(heads, head_dim, dtype, page_size, queries, tokens=16_384)
                yield Check(f"paged_decode {heads}x{head_dim} {dtype} page {page_size} batch {queries}", decode, shapes)
    for page_size in (32, 64):
        shapes = decode_shapes("32:8", 128, "bfloat16", page_size, 16, tokens=16_384)
        yield Check(f"paged_decode 32:8x128 bfloat16 page {page_size} batch 16", decode, shapes)

    narrow = decode_shapes("9:3", 64, "bfloat16", 16, 1, tokens=160)
    yield Check("paged_decode 9:3x64 bfloat16 page 16 batch 1, table of 10 pages", decode, narrow)
    million = decode_shapes("32:8", 128, "bfloat16", 16, 256, tokens=2**20)
    yield Check("paged_decode 32:8x128 bfloat16 page 16 batch 256, table of 1,048,576 tokens", decode, million)
    yield Check(f"paged_decode the same, scanned over {LAYERS} layers", partial(all_layers, facts), million)

    yield Check("broken: a buffer beyond vector memory", buffer_beyond_vector_memory, million, "(?i)vmem")
    yield Check("broken: the page table in scalar memory", table_in_scalar_memory, million, "(?i)smem")
    odd = decode_shapes("9:3", 80, "bfloat16", 16, 1, tokens=160, lanes=160)
    yield Check("broken: pages of 160 lanes", page_of_odd_width, odd, "temporary bytes")


def complaint(alias_bytes: int, temporary_bytes: int, pool: jax.ShapeDtypeStruct) -> str | None:
    """What is wrong with the memory of a compiled check, or None."""
    pool_bytes = pool.size * pool.dtype.itemsize
    if alias_bytes < pool_bytes:
        return f"only {alias_bytes:,} bytes are aliased, the pool has {pool_bytes:,}"
    if temporary_bytes > TEMPORARY_LIMIT:
        return f"{temporary_bytes:,} temporary bytes, the limit is {TEMPORARY_LIMIT:,}"
    return None


def passes(target: str, check: Check) -> bool:
    """Compiles a check, prints its line and says whether it did what it should."""
    started = time.perf_counter()
    alias_bytes = temporary_bytes = 0
    try:
        memory = compile_for(target, check.function, *check.shapes, donate=(POOL,)).memory_analysis()
        assert memory is not None, "the compiler tells nothing about memory"
        alias_bytes, temporary_bytes = memory.alias_size_in_bytes, memory.temp_size_in_bytes
        wrong = complaint(alias_bytes, temporary_bytes, check.shapes[POOL])
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
