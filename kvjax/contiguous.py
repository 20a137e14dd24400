"""The contiguous cache: one fixed span a row, no pages.  What paging is compared with.

It takes the calls a model and a serving loop make (`kvjax.reserve`, `write`, `attend`, `commit`, `release`), so that
the same code runs on either.  K and V stand in arrays of their own, addressed by row and position and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from kvjax import cache as paged
from kvjax import spans
from kvjax.attention.tiled import tiled_attention
from kvjax.attention.tiles import make_tiling, tile_size
from kvjax.grant import Grant
from kvjax.inputs import row_mask, static_size
from kvjax.pages.status import Status
from kvjax.spec import CacheSpec
from pallas_kernels.arguments import Attention, Scales

BLOCK = 128
"""Keys read at a time; spans are rounded up to it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ContiguousCache:
    """One span of memory a row, reserved whole from the start.

    Attributes:
      length: committed tokens a row.
      reserved: end of the positions a row may write now.
      keys, values: all layers' spans; layer l of row r is at l · rows + r.
      spec: the model's spec: one group with tensors k and v.
      max_context: positions a row may hold.
    """

    length: Int32[Array, " rows"]
    reserved: Int32[Array, " rows"]
    keys: Float[Array, "spans kv_heads span key_dim"]
    values: Float[Array, "spans kv_heads span value_dim"]
    spec: CacheSpec = field(metadata={"static": True})
    max_context: int = field(metadata={"static": True})

    @property
    def rows(self) -> int:
        return self.length.shape[0]


def init_contiguous(spec: CacheSpec, *, rows: int, max_context: int) -> ContiguousCache:
    """An empty contiguous cache of `rows` spans of `max_context` positions; the memory is zeroed.

    Raises:
      NotImplementedError: a spec with several groups, a window, or tensors other than k and v; use `kvjax.init`.
      ValueError: `rows` or `max_context` below 1.
    """
    rows, max_context = static_size("rows", rows), static_size("max_context", max_context)
    group = spec.groups[0]
    if len(spec.groups) != 1 or group.window is not None or {t.name for t in group.tensors} != {"k", "v"}:
        raise NotImplementedError("a contiguous cache holds one group with tensors k and v; use kvjax.init instead")
    key, value = group.tensor("k"), group.tensor("v")
    number, span = len(group.layers) * rows, -(-max_context // BLOCK) * BLOCK
    return ContiguousCache(
        length=jnp.zeros(rows, jnp.int32),
        reserved=jnp.zeros(rows, jnp.int32),
        keys=jnp.zeros((number, key.heads, span, key.width), key.dtype),
        values=jnp.zeros((number, value.heads, span, value.width), value.dtype),
        spec=spec,
        max_context=max_context,
    )


@paged.reserve.register
def _(
    cache: ContiguousCache,
    tokens: Int32[Array, " rows"],
    *,
    max_tokens: int,
    order: Int32[Array, " rows"] | None = None,
) -> tuple[ContiguousCache, Grant]:
    del order  # Rows have spans of their own and cannot take one another's.
    return spans.reserve(cache, tokens, max_tokens, capacity=cache.max_context)


@paged.write.register
def _(
    cache: ContiguousCache, layer: int | Array, grant: Grant, *, scales: Scales | None = None, **tensors: Array
) -> ContiguousCache:
    paged.refuse_scales("contiguous", scales)
    group, layer = cache.spec.groups[0], paged.as_layer(layer)
    if isinstance(layer, int):
        cache.spec.locate(layer)
    arrays = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    paged.check_tensors(group.name, {t.name: (grant.packed, t.heads, t.width) for t in group.tensors}, arrays)
    span = jnp.where(grant.row < cache.rows, layer * cache.rows + grant.row, cache.keys.shape[0])
    return replace(
        cache,
        keys=cache.keys.at[span, :, grant.position].set(arrays["k"].astype(cache.keys.dtype), mode="drop"),
        values=cache.values.at[span, :, grant.position].set(arrays["v"].astype(cache.values.dtype), mode="drop"),
    )


@paged.attend_as.register
def _(
    cache: ContiguousCache,
    layer: int | Array,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Callable[[int], Attention],
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
) -> Float[Array, "packed q_heads value_dim"]:
    layer = paged.as_layer(layer)
    paged.refuse_scales("contiguous", scales)

    def fetch(rows: Int32[Array, " tiles"], index: Int32[Array, ""]) -> tuple[Array, Array]:
        of_tiles = layer * cache.rows + jnp.minimum(rows, cache.rows - 1)

        def block(memory: Array) -> Array:
            size = (1, memory.shape[1], BLOCK, memory.shape[3])
            return jax.vmap(lambda span: lax.dynamic_slice(memory, (span, 0, index * BLOCK, 0), size)[0])(of_tiles)

        return block(cache.keys), block(cache.values)

    tiling = make_tiling(grant, tile_size(grant.packed, grant.rows))
    out = tiled_attention(
        tiling.split(q),
        tiling.tiles,
        fetch,
        block=BLOCK,
        kv_heads=cache.keys.shape[1],
        attention=attention(cache.values.shape[3]),
        sinks=sinks,
    )
    return tiling.join(out)


@paged.commit.register
def _(cache: ContiguousCache, tokens: Int32[Array, " rows"]) -> ContiguousCache:
    return spans.commit(cache, tokens)


@paged.release.register
def _(
    cache: ContiguousCache, rows: Bool[Array, " rows"], *, max_pages: int
) -> tuple[ContiguousCache, Int32[Array, " rows"]]:
    del max_pages  # Nothing is unmapped.
    rows = row_mask("rows", rows, cache.rows)
    status = jnp.where(rows & (cache.reserved == 0), Status.EMPTY, Status.OK).astype(jnp.int32)
    keep = ~rows
    return replace(cache, length=cache.length * keep, reserved=cache.reserved * keep), status


@paged.truncate.register
def _(
    cache: ContiguousCache, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[ContiguousCache, Int32[Array, " rows"]]:
    del max_pages  # Nothing is unmapped.
    return spans.truncate(cache, length, rows)


@paged.advance.register
def _(cache: ContiguousCache, completed: Int32[Array, ""] | None = None) -> ContiguousCache:
    del completed  # Nothing waits to be freed.
    return cache
