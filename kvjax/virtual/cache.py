"""The cache that a jitted step sees: a virtual space's memory as one array, and what is resident in it.

It takes the calls of any kvjax cache (`reserve`, `write`, `attend`, `commit`), so that the same model runs on it.  A
`reserve` here grants what `VirtualSpace.step` made resident and maps nothing itself; within that, a burst of several
tokens traces as it does elsewhere.

Memory that we mapped cannot be donated, so `write` stores through the addresses and the array is never rebuilt.  To
the compiler the array is a constant input.  What keeps a read after the stores is `order`: `write` returns a new one
once it has stored, 0 at run time but unknown to the compiler, and `attend` adds it to the addresses it reads from.
Return the cache, or its `order`, from a jitted step: on a GPU stores whose `order` nobody uses are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from kvjax import cache as paged
from kvjax import spans
from kvjax.attention.paged import Backend, key_and_value_dims
from kvjax.attention.tiled import tiled_attention
from kvjax.attention.tiles import make_tiling, tile_size
from kvjax.attention.xla import BLOCK_TOKENS
from kvjax.grant import Grant
from kvjax.layout import PoolLayout
from kvjax.virtual.span import PoolPlace, SpanLayout
from kvjax.virtual.substrate import Store
from pallas_kernels.arguments import Attention, Scales
from pallas_kernels.hardware import GpuFacts, TpuFacts


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class VirtualCache:
    """A virtual space during one step.

    Attributes:
      length: committed tokens a row.
      reserved: end of the positions a row may write now.
      resident: end of the positions that have memory.
      generation: of each row's request; stores for an earlier one are dropped.
      handle: which range `store` is to store to.
      order: 0, once all stores so far are done.
      memory: the whole reservation, an array a dtype, all at the same address.
      layout: where everything stands in it.
      backend: what attends: plain XLA, or a GPU's kernel.
      store: how to store through the mapping.
    """

    length: Int32[Array, " rows"]
    reserved: Int32[Array, " rows"]
    resident: Int32[Array, " rows"]
    generation: Int32[Array, " rows"]
    handle: Int32[Array, ""]
    order: Int32[Array, ""]
    memory: dict[str, Shaped[Array, "rows span_tokens record"]]
    layout: SpanLayout = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})
    store: Store = field(metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.length.shape[0]


@paged.reserve.register
def _(
    cache: VirtualCache, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[VirtualCache, Grant]:
    del order  # What is resident belongs to its row; rows cannot take it from one another.
    return spans.reserve(cache, tokens, max_tokens, capacity=cache.layout.max_context, resident=cache.resident)


@paged.write.register
def _(
    cache: VirtualCache, layer: paged.Layer, grant: Grant, *, scales: Scales | None = None, **tensors: Array
) -> VirtualCache:
    paged.refuse_scales("virtual", scales)
    index, within = paged.locate(cache.layout.spec, layer)
    group = cache.layout.spec.groups[index]
    arrays = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    paged.check_grant(cache.rows, grant)
    paged.check_tensors(group.name, {t.name: (grant.packed, t.heads, t.width) for t in group.tensors}, arrays)
    length, reserved, generation = (
        of_row.at[grant.row].get(mode="fill", fill_value=0)
        for of_row in (cache.length, cache.reserved, cache.generation)
    )
    writable = (grant.position >= length) & (grant.position < reserved)
    row = jnp.where(writable, grant.row, cache.rows)
    order = cache.order
    for place in cache.layout.places[index]:
        lanes = jnp.concatenate([arrays[name] for name, _, _ in place.pool.slices], axis=-1)
        values = lanes.astype(place.pool.dtype).reshape(grant.packed, -1)
        order = cache.store(cache.handle, order, row, grant.position, generation, _start(place, within), values)
    return replace(cache, order=order)


@paged.attend_as.register
def _(
    cache: VirtualCache,
    layer: paged.Layer,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Callable[[int], Attention],
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
) -> Float[Array, "packed q_heads value_dim"]:
    index, within = paged.locate(cache.layout.spec, layer)
    paged.check_grant(cache.rows, grant)
    paged.refuse_scales("virtual", scales)
    place = cache.layout.places[index][0]
    pool, memory, start = place.pool, cache.memory[place.pool.dtype], _start(place, within)
    key_dim, value_dim = key_and_value_dims(pool)
    if q.shape[-1] != key_dim:
        raise ValueError(f"q has head dimension {q.shape[-1]}, the cache's keys have {key_dim}")
    asked = attention(value_dim)
    if cache.backend == "xla":
        return _by_xla(memory, start, pool, cache.order, grant, q, asked, sinks)
    return _by_kernel(memory, start, pool, cache.order, grant, q, asked, sinks, cache.backend)


def _by_xla(
    memory: Shaped[Array, "rows span_tokens record"],
    start: Int32[Array, ""],
    pool: PoolLayout,
    order: Int32[Array, ""],
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None,
) -> Float[Array, "packed q_heads value_dim"]:
    key_dim, value_dim = key_and_value_dims(pool)
    longest = jnp.argmax(grant.context)

    def fetch(rows: Int32[Array, " tiles"], index: Int32[Array, ""]) -> tuple[Array, Array]:
        # Every address read has been written, or lies in the same block as one that has: padding reads the longest row,
        # and a row shorter than that its own last block again.
        context = grant.context.at[rows].get(mode="fill", fill_value=0)
        rows, context = jnp.where(context > 0, rows, longest), jnp.where(context > 0, context, grant.context[longest])
        first = jnp.minimum(index, (context - 1) // BLOCK_TOKENS) * BLOCK_TOKENS + order
        size = (1, BLOCK_TOKENS, pool.heads * pool.lanes)
        tokens = jax.vmap(lambda row, token: lax.dynamic_slice(memory, (row, token, start), size)[0])(rows, first)
        block = jnp.moveaxis(tokens.reshape(len(rows), BLOCK_TOKENS, pool.heads, pool.lanes), 2, 1)
        return block[..., :key_dim], block[..., key_dim : key_dim + value_dim]

    tiling = make_tiling(grant, tile_size(grant.packed, grant.rows))
    out = tiled_attention(
        tiling.split(q),
        tiling.tiles,
        fetch,
        block=BLOCK_TOKENS,
        kv_heads=pool.heads,
        attention=attention,
        sinks=sinks,
    )
    return tiling.join(out)


def _by_kernel(
    memory: Shaped[Array, "rows span_tokens record"],
    start: Int32[Array, ""],
    pool: PoolLayout,
    order: Int32[Array, ""],
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None,
    facts: TpuFacts | GpuFacts,
) -> Float[Array, "packed q_heads value_dim"]:
    if isinstance(facts, TpuFacts):
        raise NotImplementedError(f"{facts.name} shows its user no virtual memory; use kvjax.init(extents=...)")
    from pallas_kernels.gpu.span_attention import TILE_LINES, span_attention  # Mosaic GPU: imported when used

    size = tile_size(grant.packed, grant.rows, max(1, TILE_LINES * pool.heads // q.shape[1]))
    tiling = make_tiling(grant, size)
    # The rows are what the kernel's copies take their addresses from, so they wait for the stores.
    tiles = replace(tiling.tiles, row=tiling.tiles.row + order)
    out = span_attention(
        tiling.split(q.astype(memory.dtype)),
        memory,
        tiles,
        start,
        kv_heads=pool.heads,
        attention=attention,
        sinks=sinks,
        facts=facts,
    )
    return tiling.join(out)


@paged.commit.register
def _(cache: VirtualCache, tokens: Int32[Array, " rows"]) -> VirtualCache:
    return spans.commit(cache, tokens)


@paged.truncate.register
def _(
    cache: VirtualCache, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[VirtualCache, Int32[Array, " rows"]]:
    del max_pages  # Nothing is unmapped within a step: positions past a length are written again.
    return spans.truncate(cache, length, rows)


def _start(place: PoolPlace, within: int | Int32[Array, ""]) -> Int32[Array, ""]:
    """The element of a token's record at which a layer of a group begins."""
    first, stride = place.elements()
    return jnp.asarray(first + within * stride, jnp.int32)
