"""Who decodes in the sweep: this package's kernels, and what a user of JAX would otherwise call.

Each candidate makes two caches of its own layout, which take turns so that no cache is still warm from the call before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.decode_cases import UNUSED_PAGE, Batch, Heads, Paging, made_up, permuted
from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.hardware import TpuFacts

SETS = 2


@dataclass(frozen=True)
class Decode:
    """A decode step ready to run.

    Attributes:
      attend: (q [rows, q_heads, dim], *arrays) to [rows, q_heads, dim].
      sets: arrays of each of the caches.
      stored: (cache, row, kv_head) to that row's keys and values, [length, dim] each.
    """

    attend: Callable[..., jax.Array]
    sets: tuple[tuple[Any, ...], ...]
    stored: Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Candidate:
    """Someone who can decode; `make` raises where it cannot, and says why."""

    name: str
    make: Callable[[Batch, Heads, int], Decode]
    paged: bool = True


def kvjax_decode(attention: Callable, lane_multiple: int, batch: Batch, heads: Heads, page_size: int) -> Decode:
    """A kernel of this package. Both caches are layers of one pool; NaN stands past every length."""
    paging = permuted(batch, page_size)
    lanes = -(-2 * heads.dim // lane_multiple) * lane_multiple
    pool = made_up((SETS * paging.num_pages, heads.kv, page_size, lanes), 1)
    pages, slots = paging.past_the_ends(batch)
    for layer in range(SETS):
        pool = _poison(pool, pages + layer * paging.num_pages, slots)
    tiles = Tiles(
        jnp.arange(batch.rows, dtype=jnp.int32),
        jnp.ones(batch.rows, jnp.int32),
        jnp.array(batch.lengths, jnp.int32),
    )
    table = jnp.array(paging.table)
    what = Attention(value_dim=heads.dim, scale=heads.dim**-0.5)

    def attend(q, pool, table, tiles, page_offset):
        return attention(q[:, None], pool, table, tiles, page_offset, attention=what)[:, 0]

    def stored(layer: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        length = batch.lengths[row]
        slots = np.asarray(pool[paging.of(row, length) + layer * paging.num_pages, head].reshape(-1, lanes)[:length])
        return slots[:, : heads.dim], slots[:, heads.dim : 2 * heads.dim]

    offsets = [jnp.int32(layer * paging.num_pages) for layer in range(SETS)]
    return Decode(attend, tuple((pool, table, tiles, offset) for offset in offsets), stored)


@partial(jax.jit, donate_argnums=0)
def _poison(pool: jax.Array, pages: jax.Array, slots: jax.Array) -> jax.Array:
    return pool.at[pages, :, slots].set(jnp.nan)


def contiguous(implementation: str, batch: Batch, heads: Heads, page_size: int) -> Decode:
    """jax.nn.dot_product_attention on a cache padded to the longest row."""
    shape = (batch.rows, max(batch.lengths), heads.kv, heads.dim)
    most = 4 * batch.needed_bytes(heads)
    if (size := 4 * math.prod(shape)) > most:
        raise ValueError(f"padded to the longest row the cache takes {size / 1e9:,.0f} GB, of which most is padding")
    lengths = jnp.array(batch.lengths, jnp.int32)
    sets = tuple((made_up(shape, 2 * layer), made_up(shape, 2 * layer + 1), lengths) for layer in range(SETS))

    def attend(q, keys, values, lengths):
        call = partial(jax.nn.dot_product_attention, implementation=implementation, scale=heads.dim**-0.5)
        return call(q[:, None], keys, values, key_value_seq_lengths=lengths)[:, 0]

    def stored(layer: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values, _ = sets[layer]
        length = batch.lengths[row]
        return np.asarray(keys[row, :length, head]), np.asarray(values[row, :length, head])

    return Decode(attend, sets, stored)


def jax_ragged(batch: Batch, heads: Heads, page_size: int) -> Decode:
    """jax's ragged_paged_attention for TPU; K and V heads alternate in a page. One query a block suits decode best."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    paging = permuted(batch, page_size)
    lengths = jnp.array(batch.lengths, jnp.int32)
    starts, rows = jnp.arange(batch.rows + 1, dtype=jnp.int32), jnp.array([batch.rows], jnp.int32)
    rest = (lengths, _safe_table(paging), starts, rows)
    shape = (paging.num_pages, page_size, 2 * heads.kv, heads.dim)
    sets = tuple((made_up(shape, layer), *rest) for layer in range(SETS))
    options = {"num_kv_pages_per_block": _pages(256, page_size, rest[1]), "num_queries_per_block": 1}

    def attend(q, pool, *rest):
        return ragged_paged_attention(q, pool, *rest, sm_scale=heads.dim**-0.5, **options)

    def stored(layer: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        length = batch.lengths[row]
        both = np.asarray(sets[layer][0][paging.of(row, length), :, 2 * head : 2 * head + 2])
        both = both.reshape(-1, 2, heads.dim)[:length]
        return both[:, 0], both[:, 1]

    return Decode(attend, sets, stored)


def jax_paged(platform: str, batch: Batch, heads: Heads, page_size: int, **options: Any) -> Decode:
    """jax's paged_attention, for TPU or (in Triton) for GPU; K and V are pools of their own, heads outermost."""
    paging = permuted(batch, page_size)
    lengths, table = jnp.array(batch.lengths, jnp.int32), _safe_table(paging)
    shape = (heads.kv, paging.num_pages, page_size, heads.dim)
    sets = tuple((made_up(shape, 2 * layer), made_up(shape, 2 * layer + 1), lengths, table) for layer in range(SETS))

    def attend(q, keys, values, lengths, table):
        q = q * jnp.asarray(heads.dim**-0.5, q.dtype)
        if platform == "tpu":
            from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

            pages = _pages(256, page_size, table)
            return paged_attention(q, keys, values, lengths, table, pages_per_compute_block=pages, **options)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as in_triton

        pages = min(max(1, 128 // page_size), table.shape[1] // 16)  # of a sixteenth of a row, which a program takes
        return in_triton(q, keys, values, table, lengths, pages_per_compute_block=pages, **options)

    def stored(layer: int, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        length = batch.lengths[row]
        pages = paging.of(row, length)
        keys, values = (np.asarray(side[head, pages].reshape(-1, heads.dim)[:length]) for side in sets[layer][:2])
        return keys, values

    return Decode(attend, sets, stored)


def _pages(tokens: int, page_size: int, table: jax.Array) -> int:
    """Pages of about so many tokens, within the table."""
    return min(max(1, tokens // page_size), table.shape[1])


def _safe_table(paging: Paging) -> jax.Array:
    """A table for kernels that read entries past a row's pages."""
    return jnp.array(np.where(paging.table == UNUSED_PAGE, 0, paging.table))


def candidates(platform: str, backend: Any) -> Iterator[Candidate]:
    """Who can be measured on an accelerator, this package first."""
    if platform == "tpu":
        from pallas_kernels.tpu import paged_attention as on_tpu

        yield Candidate("kvjax", partial(kvjax_decode, partial(on_tpu.paged_attention, facts=backend), 128))
        yield Candidate("jax ragged_paged_attention", jax_ragged)
        two_cores = isinstance(backend, TpuFacts) and backend.tensor_cores > 1
        yield Candidate("jax paged_attention", partial(jax_paged, "tpu", megacore_mode="batch" if two_cores else None))
    else:
        from pallas_kernels.gpu import paged_attention as on_gpu

        yield Candidate("kvjax", partial(kvjax_decode, partial(on_gpu.paged_attention, facts=backend), 1))
        yield Candidate("cuDNN, contiguous", partial(contiguous, "cudnn"), paged=False)
        yield Candidate("XLA, contiguous", partial(contiguous, "xla"), paged=False)
        yield Candidate("jax paged_attention (Triton)", partial(jax_paged, "gpu"))


def interpreted() -> Iterator[Candidate]:
    """Who can be run without an accelerator, for correctness alone."""
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas import tpu as pltpu

    from kvjax.attention import xla
    from pallas_kernels.gpu import paged_attention as on_gpu
    from pallas_kernels.hardware import H200, TPU_V6E
    from pallas_kernels.tpu import paged_attention as on_tpu

    tpu = partial(on_tpu.paged_attention, facts=TPU_V6E, interpret=pltpu.InterpretParams())
    gpu = partial(on_gpu.paged_attention, facts=H200, interpret=plgpu.InterpretGPUParams())
    yield Candidate("kvjax, XLA", partial(kvjax_decode, xla.paged_attention, 1))
    yield Candidate("kvjax, TPU interpreter", partial(kvjax_decode, tpu, 128))
    yield Candidate("kvjax, GPU interpreter", partial(kvjax_decode, gpu, 1))
    yield Candidate("XLA, contiguous", partial(contiguous, "xla"), paged=False)
    yield Candidate("cuDNN, contiguous", partial(contiguous, "cudnn"), paged=False)
    yield Candidate("jax paged_attention", partial(_under_interpreter, partial(jax_paged, "tpu")))
    yield Candidate("jax paged_attention (Triton)", partial(jax_paged, "gpu", interpret=True))


def _under_interpreter(make: Callable[[Batch, Heads, int], Decode], *arguments: Any) -> Decode:
    """A candidate without an option for the interpreter, in it."""
    from jax.experimental.pallas import tpu as pltpu

    decode = make(*arguments)

    def attend(*arrays):
        with pltpu.force_tpu_interpret_mode():
            return decode.attend(*arrays)

    return replace(decode, attend=attend)
