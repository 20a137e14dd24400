"""Compiles a step on a virtual cache for Hopper GPUs: `python -m tests.compile.virtual_gpu [target …]`.

Prints a line for each target and check, and exits non-zero if one fails.  The store kernel must compile for sm_90a
without spilling a register; a step that stores and attends must not copy the memory, which is an input of 8 GiB; and a
shape the kernel cannot store must be refused, which shows that the gate can fail.  None of this runs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from kvjax.attention.xla import BLOCK_TOKENS
from kvjax.virtual.cache import VirtualCache
from kvjax.virtual.cuda import _store as cuda_store
from kvjax.virtual.span import span_layout
from pallas_kernels.gpu.store_through import store_through
from pallas_kernels.hardware import GPUS
from tests.compile.gpu_target import compile_for, mosaic_kernels

ROWS, TOKENS, LAYERS, HEADS, WIDTH = 64, 4096, 8, 8, 128
TEMPORARY_LIMIT = 64 << 20
ADDRESS = 0x7F00_0000_0000


def shape(*sizes: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def virtual_cache(target: str, heads: int) -> VirtualCache:
    """A cache of shapes, whose stores go to an address that nothing is mapped at."""
    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=heads, head_dim=WIDTH)
    layout = span_layout(
        spec,
        rows=ROWS,
        max_context=TOKENS,
        page_group_bytes=2 << 20,
        granularity=2 << 20,
        block=BLOCK_TOKENS,
        reads_at_once=64,
    )

    memory = {dtype: shape(*layout.shape(dtype), dtype=dtype) for dtype in layout.dtypes}
    rows = [shape(ROWS) for _ in range(4)]
    return VirtualCache(
        *rows, shape(), shape(), memory, layout=layout, backend=GPUS[target], store=partial(cuda_store, layout, ADDRESS)
    )


def step(cache: VirtualCache, tokens: Any, q: Any, k: Any, v: Any) -> Any:
    """One token a row through all layers."""
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=ROWS)

    def layer(order: Any, index: Any) -> tuple[Any, Any]:
        written = kvjax.write(replace(cache, order=order), index, grant, k=k, v=v)
        return written.order, kvjax.attend(written, index, grant, q)

    return jax.lax.scan(layer, cache.order, jnp.arange(LAYERS))


def check_step(target: str) -> str | None:
    """What is wrong with a compiled step, if anything."""
    cache = virtual_cache(target, HEADS)
    inputs = [shape(ROWS, heads, WIDTH, dtype="bfloat16") for heads in (4 * HEADS, HEADS, HEADS)]
    with mosaic_kernels() as kernels:
        compiled = compile_for(target, step, cache, shape(ROWS), *inputs)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    if spilled := sum(kernel.spill_bytes for kernel in kernels):  # of those not compiled for another target before
        return f"{spilled} bytes of registers spilled"
    if temporary > TEMPORARY_LIMIT:
        return f"{temporary >> 20} MiB of temporaries: the memory is copied"
    return None


def check_refusal(target: str) -> str | None:
    """A token of 100 elements cannot be stored by whole warpgroups."""
    sizes = {"rows": ROWS, "row_elements": 1 << 20, "token_elements": 100}
    arrays = (shape(), shape(ROWS), shape(ROWS), shape(), shape(ROWS, 100, dtype="bfloat16"))
    try:
        compile_for(target, partial(store_through, address=ADDRESS, **sizes), *arrays)
    except NotImplementedError as error:
        return None if "multiple of 128" in str(error) else f"refused for another reason: {error}"
    return "compiled, and should have been refused"


def main(targets: list[str]) -> int:
    failures = 0
    for target in targets or list(GPUS):
        for name, check in (("store and attend", check_step), ("broken: 100 elements", check_refusal)):
            wrong = check(target)
            failures += wrong is not None
            print(f"{target:6s} virtual {name:22s} {wrong or 'ok'}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
