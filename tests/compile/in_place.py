"""Is every cache call in place?  Compiles each, alone and inside a scan, for two pool sizes, and compares.

    python -m tests.compile.in_place cpu | tpu | gpu

Each call must alias the whole cache it is given, and its temporaries must depend neither on the pool nor on the width
of the page table: 16 thousand pages and 16 thousand positions a row, against 4 million pages and a million positions.
The TPU compiler keeps small arrays in VMEM and gives scatters and gathers to the SparseCore by their size, each with
other scratch: there the pools are compared with that placement off, for one width of table, and as users compile all
temporaries must be smaller than one copy of an array of the large pool.
Each call has 64 rows; a step with all transitions is compiled with 1,024 rows too, and on extents, but for GPUs: what
these add to the single calls is in `tests.extents.test_in_place`.  The last case is a step that needs its input after
changing it, which the gate must refuse.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

import kvjax
from kvjax.engine.backing import PagedBacking
from kvjax.engine.batch import make_decode, make_slots
from kvjax.engine.burst import decode_burst
from kvjax.engine.speculation import Drafter, NoDrafts, PromptLookup
from kvjax.engine.swap_steps import restore_pages, save_pages, unpin_pages
from kvjax.extents import Moves
from kvjax.grant import make_grant
from pallas_kernels.hardware import GpuFacts

SMALL, LARGE = 1 << 14, 1 << 22
SMALL_OF_EXTENTS = 1 << 17
"""The same on extents: for fewer pages the TPU compiler takes other scratch, half a mebibyte less and whatever the pool
beyond that."""
ROWS, MANY_ROWS = 64, 1024
LAYERS, KV_HEADS, Q_HEADS, DIM, PAGE_SIZE = 1, 1, 2, 64, 16
NARROW, WIDE = 1 << 14, 1 << 20
"""Positions a row may hold, in the small and the large cache: page tables of 1,024 and 65,536 columns."""
PREFILL, MAX_PAGES, STEPS = 256, 512, 8
SLACK_BYTES = 4096
"""How much more temporaries the large cache may take: alignment."""
PADDED_LIST_BYTES = 32 << 10
"""The same on TPU: a list of 64 rows padded to whole tiles.  One call of 28 differs by one; the others are equal."""
ONE_COPY_BYTES = 16 << 20
"""Of a per-page array of the large pool.  With placement by size, all temporaries of a call stay below it."""
WITHOUT_PLACEMENT = {
    "xla_msa_enable": "false",
    "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
    "xla_tpu_enable_offloading_gather_to_sparsecore": "false",
    "xla_tpu_enable_offloading_sort_to_sparsecore": "false",
}

Compile = Callable[..., jax.stages.Compiled]


@dataclass(frozen=True)
class Case:
    """A call `function(cache, *arguments)` whose first result is the next cache (or no cache, if it only reads)."""

    name: str
    function: Callable
    arguments: tuple[Any, ...] = ()
    reads_only: bool = False
    rows: int = ROWS
    extents: kvjax.extents.ExtentOptions | None = None
    small: int = SMALL


def cases() -> Iterator[Case]:
    """Every call on a cache, and whole steps, alone and in a scan."""
    per_row, mask, ids = (jax.ShapeDtypeStruct((n,), d) for n, d in ((ROWS, "int32"), (ROWS, "bool"), (16, "int32")))
    scalar = jax.ShapeDtypeStruct((), "int32")

    def tensors(packed: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct((packed, KV_HEADS, DIM), "bfloat16") for name in ("k", "v")}

    def queries(packed: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((packed, Q_HEADS, DIM), "bfloat16")

    for name, packed in (("decode", ROWS), ("prefill", PREFILL)):
        grant = jax.eval_shape(partial(make_grant, max_tokens=packed), per_row, per_row, per_row)
        yield Case(f"reserve, {name}", partial(kvjax.reserve, max_tokens=packed), (per_row,))
        yield Case(f"write, {name}", _write, (scalar, grant, tensors(packed)))
        yield Case(f"attend, {name}", kvjax.attend, (scalar, grant, queries(packed)), reads_only=True)
        step = partial(_step, packed)
        yield Case(f"whole step, {name}", step, (per_row, tensors(packed), queries(packed)))
        yield Case(f"two steps, {name}", partial(_two_steps, packed), (per_row, tensors(packed), queries(packed)))
        yield Case(f"scan of steps, {name}", partial(_scan, step), (per_row, tensors(packed), queries(packed)))
    yield Case("commit", kvjax.commit, (per_row,))
    yield Case("advance", kvjax.advance, (scalar,))
    yield Case("release", partial(kvjax.release, max_pages=MAX_PAGES), (mask,))
    yield Case("truncate", partial(kvjax.truncate, max_pages=MAX_PAGES), (per_row,))
    yield Case("fork", partial(kvjax.fork, max_pages=MAX_PAGES), (per_row,))
    yield Case("reorder", partial(kvjax.reorder, max_pages=MAX_PAGES), (per_row,))
    prefix = (jax.ShapeDtypeStruct((ROWS, 32), "int32"),)
    yield Case("adopt", partial(kvjax.adopt, max_pages=MAX_PAGES), (prefix, per_row))
    yield Case("pin", kvjax.pin, ((ids,),))
    yield Case("unpin", kvjax.unpin, ((ids,),))
    backing = PagedBacking(LARGE, PAGE_SIZE, WIDE)  # its sizes reach no shape here
    _, pinned, images = jax.eval_shape(save_pages, cache_shapes(ROWS, SMALL, NARROW, "xla"), ids, ids)
    yield Case("save pages", save_pages, (ids, ids))
    yield Case("unpin saved pages", partial(unpin_pages, backing), (pinned,))
    yield Case("restore pages", partial(restore_pages, backing), (per_row, ids, ids, images))
    yield Case("scan of lifecycles", partial(_scan, _lifecycle), (mask, per_row))
    beam = (per_row, tensors(ROWS), queries(ROWS))
    yield Case("scan of steps and beams", partial(_scan, _beam_step), beam)
    for name, drafter in (("burst", NoDrafts()), ("burst with drafts", PromptLookup(tokens=3, seen=64))):
        yield Case(name, *_burst(backing, drafter))
    many = jax.ShapeDtypeStruct((MANY_ROWS,), "int32")
    beam = (many, tensors(MANY_ROWS), queries(MANY_ROWS))
    yield Case("the same, 1,024 rows", partial(_scan, _beam_step), beam, rows=MANY_ROWS)
    yield from _extent_cases((mask, per_row), _burst(backing, PromptLookup(tokens=3, seen=64)))


def _extent_cases(lifecycle: tuple[Any, ...], burst: tuple[Callable, tuple[Any, ...]]) -> Iterator[Case]:
    """Transitions and a burst in a loop, and a compaction with its page copies, on extents."""
    options = kvjax.extents.ExtentOptions(span=32, max_runs=128)  # the same for both pools
    moves = Moves(*(jax.ShapeDtypeStruct((size,), "int32") for size in (ROWS, ROWS, 128, 128, 128)))
    extents = partial(Case, extents=options, small=SMALL_OF_EXTENTS)
    yield extents("extents: lifecycles", partial(_scan, _lifecycle), lifecycle)
    yield extents("extents: burst", *burst)
    yield extents("extents: compact", partial(kvjax.compact, max_pages=MAX_PAGES), (moves,))


class OneLayer:
    """The least a burst needs of a model: a layer of attention over an embedding."""

    vocabulary = 256

    def forward(self, parameters: Any, cache: kvjax.KVCache, grant: kvjax.Grant, tokens: Any) -> tuple[Any, Any]:
        x = parameters[tokens]
        cache = kvjax.write(cache, 0, grant, k=x[:, None, :DIM], v=x[:, None, DIM:])
        return kvjax.attend(cache, 0, grant, x.reshape(-1, Q_HEADS, DIM)).reshape(x.shape), cache

    def logits(self, parameters: Any, hidden: Any) -> Any:
        return jnp.dot(hidden, parameters.T, preferred_element_type=jnp.float32)


def _burst(backing: PagedBacking, drafter: Drafter) -> tuple[Callable, tuple[Any, ...]]:
    """Decode steps of all rows in a loop, with pages allocated and drafts rolled back inside; and its arguments."""
    model, parameters = OneLayer(), jax.ShapeDtypeStruct((OneLayer.vocabulary, Q_HEADS * DIM), "bfloat16")
    decode = jax.eval_shape(
        partial(make_decode, [], rows=ROWS, number=ROWS, steps=STEPS, yield_early=False, seen=drafter.seen)
    )
    slots = jax.eval_shape(partial(make_slots, [], rows=ROWS, number=ROWS))

    def run(cache: kvjax.KVCache, parameters: Any, *arguments: Any) -> tuple[kvjax.KVCache, Any]:
        return decode_burst(model, backing, drafter, STEPS, None, parameters, cache, *arguments)

    return run, (parameters, decode, slots)


def _write(cache: kvjax.KVCache, layer: Any, grant: kvjax.Grant, tensors: dict[str, Any]) -> kvjax.KVCache:
    return kvjax.write(cache, layer, grant, **tensors)


def _step(packed: int, cache: kvjax.KVCache, tokens: Any, tensors: Any, q: Any) -> tuple[kvjax.KVCache, Any]:
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=packed)

    def layer(cache: kvjax.KVCache, index: Any) -> tuple[kvjax.KVCache, Any]:
        cache = kvjax.write(cache, index, grant, **tensors)
        return cache, kvjax.attend(cache, index, grant, q)

    cache, out = lax.scan(layer, cache, jnp.arange(LAYERS))
    cache, out = kvjax.after(cache, out)
    return kvjax.advance(kvjax.commit(cache, grant.tokens)), out


def _two_steps(packed: int, cache: kvjax.KVCache, tokens: Any, tensors: Any, q: Any) -> tuple[kvjax.KVCache, Any]:
    """One after the other in one program, and rows leave at the end: nothing but `after` orders them."""
    cache, first = _step(packed, cache, tokens, tensors, q)
    cache, second = _step(packed, cache, tokens, tensors, q)
    cache, _ = kvjax.release(cache, tokens > 0, max_pages=MAX_PAGES)
    return cache, (first, second)


def _beam_step(cache: kvjax.KVCache, parent: Any, tensors: Any, q: Any) -> tuple[kvjax.KVCache, Any]:
    """A decode step, then every transition that rewrites the table it has just read."""
    cache, out = _step(cache.rows, cache, parent, tensors, q)
    cache, _ = _lifecycle(cache, parent > 0, parent)
    return cache, out


def _lifecycle(cache: kvjax.KVCache, mask: Any, parent: Any) -> tuple[kvjax.KVCache, Any]:
    cache, status = kvjax.fork(cache, parent, max_pages=MAX_PAGES)
    cache, _ = kvjax.reorder(cache, parent, max_pages=MAX_PAGES)
    cache, _ = kvjax.truncate(cache, cache.table.length // 2, max_pages=MAX_PAGES)
    cache, _ = kvjax.release(cache, mask, max_pages=MAX_PAGES)
    return kvjax.advance(cache), status


def _scan(step: Callable, cache: kvjax.KVCache, *arguments: Any) -> tuple[kvjax.KVCache, Any]:
    return lax.scan(lambda cache, _: step(cache, *arguments), cache, None, length=STEPS)


def cache_shapes(
    rows: int, num_pages: int, max_context: int, backend: Any, extents: kvjax.extents.ExtentOptions | None = None
) -> kvjax.KVCache:
    """The cache as shapes: nothing is allocated."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM)
    build = partial(kvjax.init, spec, rows=rows, num_pages=num_pages, page_size=PAGE_SIZE, max_context=max_context)
    return jax.eval_shape(partial(build, backend=backend, extents=extents))


@dataclass(frozen=True)
class Target:
    """Where to compile for.

    Attributes:
      name: as printed.
      backend: the cache's, which chooses the kernels.
      compile_for: as users compile.
      compare: how the two sizes are compared, if not as users compile.
      narrow: positions a row may hold in the small cache.
      slack: bytes by which temporaries may grow.
    """

    name: str
    backend: Any
    compile_for: Compile
    compare: Compile | None = None
    narrow: int = NARROW
    slack: int = SLACK_BYTES


def measure(
    case: Case, compile_for: Compile, backend: Any, *, num_pages: int, max_context: int
) -> tuple[bool, int, int]:
    """(the whole cache is aliased, bytes aliased, bytes of temporaries) of one call for one size of cache."""
    cache = cache_shapes(case.rows, num_pages, max_context, backend, case.extents)
    donate = () if case.reads_only else (0,)
    memory = compile_for(case.function, cache, *case.arguments, donate=donate).memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    alias = memory.alias_size_in_bytes
    return case.reads_only or alias >= whole, alias, memory.temp_size_in_bytes


def check(case: Case, target: Target) -> tuple[bool, str]:
    """(in place, a line that says so) for one call."""
    compare = target.compare or target.compile_for
    aliased, _, small = measure(case, compare, target.backend, num_pages=case.small, max_context=target.narrow)
    large_aliased, alias, large = measure(case, compare, target.backend, num_pages=LARGE, max_context=WIDE)
    good = aliased and large_aliased and large - small <= target.slack
    note = "reads only" if case.reads_only else f"alias {alias:>14,} B"
    line = f"{case.name:24s} {note:22s} temporaries {small:>11,} B and {large:>11,} B"
    if target.compare is not None:
        aliased, _, placed = measure(case, target.compile_for, target.backend, num_pages=LARGE, max_context=WIDE)
        good &= aliased and placed < ONE_COPY_BYTES * case.rows // ROWS
        line += f"; as users compile {placed:>11,} B"
    return good, line


def run(target: Target) -> int:
    """Checks all cases, prints a line each, and returns the number of failures."""
    passed = failed = 0
    for case in cases():
        if case.extents and isinstance(target.backend, GpuFacts):
            continue  # they are for where memory cannot be remapped, and take this compiler minutes
        good, line = check(case, target)
        passed, failed = passed + good, failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'} {target.name:6s} {line}", flush=True)
    broken = Case("a step that looks back", partial(_scan, _looks_back), (jax.ShapeDtypeStruct((ROWS,), "int32"),))
    good, line = check(broken, target)
    passed, failed = passed + (not good), failed + good
    verdict = "not refused" if good else "refused"
    print(f"{'FAIL' if good else 'ok  '} {target.name:6s} {line} (broken on purpose: {verdict})")
    print(f"{passed} passed, {failed} failed")
    return failed


def _looks_back(cache: kvjax.KVCache, tokens: Any) -> tuple[kvjax.KVCache, Any]:
    """Reads the refcounts of before at places known only after: both arrays must live, and one is a copy."""
    after, _ = kvjax.reserve(cache, tokens, max_tokens=ROWS)
    places = after.table.groups[0].refcount[:ROWS] + after.table.groups[0].pages[:, 0]
    return kvjax.advance(after), cache.table.groups[0].refcount[places]


def compile_on_cpu(function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()


def main(name: str) -> int:
    if name == "cpu":
        return run(Target("cpu", "xla", compile_on_cpu))
    if name == "tpu":
        from pallas_kernels.hardware import TPU_V6E
        from tests.compile import tpu_target

        compile_for = partial(tpu_target.compile_for, "v6e")
        compare = partial(compile_for, options=WITHOUT_PLACEMENT)
        return run(Target("v6e", TPU_V6E, compile_for, compare, WIDE, PADDED_LIST_BYTES))
    if name == "gpu":
        from pallas_kernels.hardware import H200
        from tests.compile import gpu_target

        return run(Target("h200", H200, partial(gpu_target.compile_for, "h200")))
    raise SystemExit(f"target {name!r} is unknown; use cpu, tpu or gpu")


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
