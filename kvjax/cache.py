"""The cache: page tables and pools of all groups, and the calls that model code makes.

    cache, grant = kvjax.reserve(cache, tokens, max_tokens=T)
    for layer in range(layers):
        cache = kvjax.write(cache, layer, grant, k=k, v=v)
        out = kvjax.attend(cache, layer, grant, q)
    cache, out = kvjax.after(cache, out)
    cache = kvjax.commit(cache, grant.tokens)

Everything traces, inside `lax.scan` and `while_loop` too, and works in place when the cache is donated.  Each call
dispatches on the kind of cache, so that the same model runs on `ContiguousCache`.

In place has one condition: what changes the cache must come after what read it.  XLA sees that where a layer's keys
depend on the layer before.  `after` tells it the rest: that a step's attention is done before rows are forked,
released or served again in the same program.  Otherwise XLA may keep a copy of the pool or the table for the read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from kvjax import extents, pages
from kvjax.attention.paged import Backend, key_and_value_dims, paged_attention
from kvjax.extents import Extents, ExtentTable, Moves
from kvjax.grant import Grant, make_grant
from kvjax.inputs import integers, static_size
from kvjax.layout import PageLayout
from kvjax.pages import Fault, PageTable, Status
from kvjax.spec import CacheSpec
from kvjax.storage import Pool, append_tokens, copy_pages, scales_by_name
from pallas_kernels.arguments import Attention, Scales

Layer = int | Array | tuple[str, int | Array]
"""A model layer: its number; or (group name, index within the group), which may be traced with several groups."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class KVCache:
    """Page tables and pools of all groups: one immutable pytree.

    Attributes:
      table: who owns which page.
      pools: for each group, its arrays by name (see `layout`).
      spec: what the model caches.
      layouts: where each group's tensors stand in its pools.
      backend: which code attends.
      extents: for a cache whose pages are kept side by side, what `kvjax.extents` knows of each group beside the table.
    """

    table: PageTable
    pools: tuple[dict[str, Pool], ...]
    spec: CacheSpec = field(metadata={"static": True})
    layouts: tuple[PageLayout, ...] = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})
    extents: tuple[Extents, ...] | None = None

    @property
    def rows(self) -> int:
        return self.table.rows

    @property
    def max_context(self) -> int:
        """The most positions a row may hold."""
        return min(group.width * group.page_size for group in self.table.groups)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for group in self.pools for pool in group.values())

    @property
    def ownership(self) -> PageTable | ExtentTable:
        """What the `transitions` of this cache take and give."""
        return self.table if self.extents is None else ExtentTable(self.table, self.extents)

    @property
    def transitions(self) -> ModuleType:
        """The functions that move ownership: `kvjax.pages`, or `kvjax.extents` with the same contract."""
        return pages if self.extents is None else extents

    def with_ownership(self, ownership: PageTable | ExtentTable) -> KVCache:
        """The cache after a transition, which gave `ownership`."""
        if isinstance(ownership, ExtentTable):
            return replace(self, table=ownership.table, extents=ownership.extents)
        return replace(self, table=ownership)


def after[Cache, Values](cache: Cache, values: Values) -> tuple[Cache, Values]:
    """The same cache and values, the cache to be changed only once the values are computed.

    Pass what `attend` gave, or what came of it, and go on with both results: `cache, out = kvjax.after(cache, out)`.
    (A dependency nobody uses is taken out by the compiler.)  Costs nothing, and saves a copy of the pool or the table.
    """
    return lax.optimization_barrier((cache, values))


@singledispatch
def reserve(
    cache: Any, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[Any, Grant]:
    """Makes the next `tokens[row]` positions of each row writable; all or nothing a row, over all groups.

    Shared tail pages are copied, every tensor and layer, before the new table is visible.

    Args:
      cache: the cache; donate it.
      tokens: positions wanted, 0 for rows that want none.
      max_tokens: static length of the packed lists and bound on the sum of `tokens`.
      order: priority of each row, smaller served first; row order if None.

    Returns the cache and a `Grant`: `grant.status` says why a row was refused; `raise_for_status` raises on the host.
    Cost: O(rows + max_tokens) and the page copies there are; nothing grows with the pool.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def write(
    cache: Any, layer: Layer, grant: Grant, *, scales: Scales | None = None, **tensors: Shaped[Array, "packed _ _"]
) -> Any:
    """Writes a layer's tensors for every granted token, by name: `write(cache, layer, grant, k=k, v=v)`.

    Args:
      cache: the cache; donate it.
      layer: the layer; may be traced.
      grant: from `reserve`.
      scales: of a float8 or int8 cache, `kvjax.attention.Scales`, each one number or one a head, traced: keys and
        values are divided by theirs, rounded to nearest even and saturate. Pass the same to `attend`. None casts only.
      tensors: all tensors of the layer's group, cast to the cache's dtype.

    Raises ValueError for tensors or scales that the cache does not take, NotImplementedError for scales a token.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


def attend(
    cache: Any,
    layer: Layer,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    *,
    scale: float | None = None,
    window: int | None = None,
    kept: int = 0,
    soft_cap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    scales: Scales | None = None,
) -> Float[Array, "packed q_heads value_dim"]:
    """Causal attention of every granted token over its row, itself included; zeros in padding.

    Args:
      cache: the cache, with this layer's tensors of the granted tokens written.
      layer: the layer; may be traced.
      grant: from `reserve`.
      q: queries, one a granted token; q_heads is a multiple of the cached heads, which consecutive queries share.
      scale: multiplies the logits; key_dim ** −0.5 if None.
      window: a token sees the last `window` positions, itself included; None: all before it.
      kept: the first `kept` positions stay visible beyond the window (StreamingLLM).
      soft_cap: logits become soft_cap · tanh(logits / soft_cap) (Gemma 2).
      sinks: a logit a query head that takes its share of the softmax and gives no value (gpt-oss).
      scales: `kvjax.attention.Scales`, what the keys and values of a float8 or int8 cache are multiplied by; `write`
        divides by the same.

    The window hides positions and, in the kernels, spares reading them; their pages stay the row's.
    """
    q = check_queries(q, grant)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    attention = partial(Attention, scale=scale, window=window, kept=kept, soft_cap=soft_cap)
    return attend_as(cache, layer, grant, q, attention, check_sinks(sinks, q), scales)


@singledispatch
def attend_as(
    cache: Any,
    layer: Layer,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Callable[[int], Attention],
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
) -> Float[Array, "packed q_heads value_dim"]:
    """`attend` of one kind of cache, once the arguments are checked; `attention` lacks the values' width."""
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def commit(cache: Any, tokens: Int32[Array, " rows"]) -> Any:
    """Lengthens each row by `tokens[row]` of the tokens it was granted; only here do lengths move.

    A row given more than it reserved is left as it was and sets the sticky fault `Fault.COMMIT_REFUSED`.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def release(cache: Any, rows: Bool[Array, " rows"], *, max_pages: int) -> tuple[Any, Int32[Array, " rows"]]:
    """Empties rows (finish, cancel, preempt); returns the cache and `Status` codes.

    Args:
      cache: the cache; donate it.
      rows: the rows to empty.
      max_pages: static bound on the pages unmapped in one group, over all rows; OVER_BOUND beyond it.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def truncate(
    cache: Any, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[Any, Int32[Array, " rows"]]:
    """Rewinds rows to `length` committed tokens and gives back what lies beyond, reserved positions included.

    Args:
      cache: the cache; donate it.
      length: the new length of each row; its present length gives back just what was reserved and not committed.
      max_pages: static bound on the pages unmapped in one group, over all rows; OVER_BOUND beyond it.
      rows: the rows to act on; all if None.

    Returns the cache and `Status` codes: NOT_RESERVED where `length` is negative or beyond the committed length.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def advance(cache: Any, completed: Int32[Array, ""] | None = None) -> Any:
    """Closes the epoch and frees the pages dropped up to the end of epoch `completed`; O(1).

    None means the open one: right when all steps run on one stream in the order they were enqueued.  An epoch that
    cannot be completed (see `pages.advance`, which says so) frees nothing.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@reserve.register
def _(
    cache: KVCache, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[KVCache, Grant]:
    ownership, info = cache.transitions.reserve(cache.ownership, tokens, max_tokens=max_tokens, order=order)
    copies = jnp.int32(0)
    for group, copy in zip(cache.table.groups, info.copies, strict=True):
        copies += jnp.sum(copy.source < group.num_pages, dtype=jnp.int32)
    grant = make_grant(info.tokens, info.status, cache.table.length, max_tokens, copies)
    pools = tuple(_copied(cache, index, copy) for index, copy in enumerate(info.copies))
    return replace(cache.with_ownership(ownership), pools=pools), grant


@write.register
def _(cache: KVCache, layer: Layer, grant: Grant, *, scales: Scales | None = None, **tensors: Array) -> KVCache:
    index, within = locate(cache.spec, layer)
    table, spec, layout = cache.table, cache.spec.groups[index], cache.layouts[index]
    group = table.groups[index]
    arrays = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    check_grant(cache.rows, grant)
    check_tensors(spec.name, {t.name: (grant.packed, t.heads, t.width) for t in spec.tensors}, arrays)
    named_scales = scales_by_name(spec, arrays, scales)
    # Only reserved positions past the length are the row's own: a grant kept from before a release writes nothing.
    length, reserved = (
        of_row.at[grant.row].get(mode="fill", fill_value=0) for of_row in (table.length, table.reserved)
    )
    writable = (grant.position >= length) & (grant.position < reserved)
    logical = grant.position // group.page_size
    page = group.pages.at[grant.row, logical % group.width].get(mode="fill", fill_value=group.num_pages)
    # The table must not change before it was read, or the compiler keeps a copy of it for the read.
    page, entries = lax.optimization_barrier((page, group.pages))
    none = len(spec.layers) * group.num_pages
    page = jnp.where(writable & (page < group.num_pages), within * group.num_pages + page, none)
    offset = grant.position % group.page_size
    pools = {
        pool.name: append_tokens(cache.pools[index][pool.name], pool, page, offset, arrays, named_scales, cache.backend)
        for pool in layout.pools
    }
    groups = (*table.groups[:index], replace(group, pages=entries), *table.groups[index + 1 :])
    return replace(
        cache,
        table=replace(table, groups=groups),
        pools=(*cache.pools[:index], pools, *cache.pools[index + 1 :]),
    )


@attend_as.register
def _(
    cache: KVCache,
    layer: Layer,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    attention: Callable[[int], Attention],
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
) -> Float[Array, "packed q_heads value_dim"]:
    index, within = locate(cache.spec, layer)
    group, layout = cache.table.groups[index], cache.layouts[index].pools[0]
    check_grant(cache.rows, grant)
    _, value_dim = key_and_value_dims(layout)
    return paged_attention(
        q,
        grant,
        cache.pools[index][layout.name],
        layout,
        group.pages,
        within * group.num_pages,
        runs=None if cache.extents is None else cache.extents[index].runs,
        attention=attention(value_dim),
        sinks=sinks,
        scales=scales,
        backend=cache.backend,
    )


@commit.register
def _(cache: KVCache, tokens: Int32[Array, " rows"]) -> KVCache:
    ownership, info = cache.transitions.commit(cache.ownership, tokens)
    refused = jnp.any(info.status != Status.OK)
    cache = cache.with_ownership(ownership)
    faults = cache.table.faults | jnp.where(refused, jnp.int32(Fault.COMMIT_REFUSED), 0)
    return replace(cache, table=replace(cache.table, faults=faults))


@release.register
def _(cache: KVCache, rows: Bool[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    ownership, info = cache.transitions.release(cache.ownership, rows, max_pages=max_pages)
    return cache.with_ownership(ownership), info.status


@advance.register
def _(cache: KVCache, completed: Int32[Array, ""] | None = None) -> KVCache:
    completed = cache.table.epoch if completed is None else completed
    return cache.with_ownership(cache.transitions.advance(cache.ownership, completed)[0])


@truncate.register
def _(
    cache: KVCache, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[KVCache, Int32[Array, " rows"]]:
    ownership, info = cache.transitions.truncate(cache.ownership, length, max_pages=max_pages, rows=rows)
    return cache.with_ownership(ownership), info.status


def fork(cache: KVCache, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Empty rows share a parent's committed pages until they write; see `pages.fork`."""
    ownership, info = _paged(cache).transitions.fork(cache.ownership, parent, max_pages=max_pages)
    return cache.with_ownership(ownership), info.status


def reorder(cache: KVCache, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Every row takes its parent's pages at once, for beam search; see `pages.reorder`."""
    ownership, info = _paged(cache).transitions.reorder(cache.ownership, parent, max_pages=max_pages)
    return cache.with_ownership(ownership), info.status


def adopt(
    cache: KVCache,
    pages_of_groups: Sequence[Int32[Array, "rows _"]],
    tokens: Int32[Array, " rows"],
    *,
    max_pages: int,
) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Empty rows map pages that somebody holds: a prefix hit; see `pages.adopt`."""
    ownership, info = _paged(cache).transitions.adopt(cache.ownership, pages_of_groups, tokens, max_pages=max_pages)
    return cache.with_ownership(ownership), info.status


def compact(cache: KVCache, moves: Moves, *, group: int = 0, max_pages: int) -> tuple[KVCache, Int32[Array, ""]]:
    """Moves pages of one group, bytes and ownership, so that rows come to fewer runs; or does nothing.

    The pages left behind are not reused before the epoch that may still read them is complete (`advance`).

    Args:
      cache: a cache on extents; donate it.
      moves: what to move, as `kvjax.extents.plan_compaction(cache.ownership, …)` says for this very state.
      group: which group's pages.
      max_pages: static bound on the pages of the rows that are touched.

    Returns the cache and one `Status`; see `kvjax.extents.compact`, whose cost it has and that of copying the pages.

    Raises:
      ValueError: a cache whose pages are not kept side by side.
    """
    ownership = _paged(cache).ownership
    if not isinstance(ownership, ExtentTable):
        raise ValueError("this cache has no extents to compact; make it with kvjax.init(…, extents=ExtentOptions())")
    ownership, info = extents.compact(ownership, moves, group=group, max_pages=max_pages)
    pools = (*cache.pools[:group], _copied(cache, group, info.copies), *cache.pools[group + 1 :])
    return replace(cache.with_ownership(ownership), pools=pools), info.status


def take_part(cache: KVCache, name: str) -> KVCache:
    """The groups joined under `name` (see `CacheSpec.join`) as a cache of their own, for the model they belong to.

    Rows and lengths are the whole cache's.  Write and attend through it, then put it back with `put_part`; what moves
    ownership (`reserve`, `commit`, …) is called on the whole cache.  Costs nothing.
    """
    spec, indices = cache.spec.part(name)
    return replace(
        cache,
        table=replace(cache.table, groups=tuple(cache.table.groups[index] for index in indices)),
        pools=tuple(cache.pools[index] for index in indices),
        spec=spec,
        layouts=tuple(cache.layouts[index] for index in indices),
        extents=None if cache.extents is None else tuple(cache.extents[index] for index in indices),
    )


def put_part(cache: KVCache, name: str, part: KVCache) -> KVCache:
    """The cache with what `take_part` took, as it is now."""
    _, indices = cache.spec.part(name)
    groups, pools = list(cache.table.groups), list(cache.pools)
    for index, group, arrays in zip(indices, part.table.groups, part.pools, strict=True):
        groups[index], pools[index] = group, arrays
    return replace(cache, table=replace(cache.table, groups=tuple(groups)), pools=tuple(pools))


def pin(
    cache: KVCache, pages_of_groups: Sequence[Int32[Array, " _"]]
) -> tuple[KVCache, tuple[Int32[Array, " ids"], ...]]:
    """Holds pages without a row; see `pages.pin`."""
    ownership, info = _paged(cache).transitions.pin(cache.ownership, pages_of_groups)
    return cache.with_ownership(ownership), info.status


def unpin(
    cache: KVCache, pages_of_groups: Sequence[Int32[Array, " _"]]
) -> tuple[KVCache, tuple[Int32[Array, " ids"], ...]]:
    """Lets go of pages that `pin` held; see `pages.unpin`."""
    ownership, info = _paged(cache).transitions.unpin(cache.ownership, pages_of_groups)
    return cache.with_ownership(ownership), info.status


def _copied(cache: KVCache, index: int, copy: pages.PageCopy) -> dict[str, Pool]:
    """The pools of a group with pages copied, every tensor and layer."""
    num_pages = cache.table.groups[index].num_pages
    return {
        name: copy_pages(pool, num_pages, copy.source, copy.target, cache.backend)
        for name, pool in cache.pools[index].items()
    }


def _paged(cache: Any) -> KVCache:
    if not isinstance(cache, KVCache):
        raise TypeError(f"{type(cache).__name__} has no pages to share or hold; make the cache with kvjax.init")
    return cache


def locate(spec: CacheSpec, layer: Layer) -> tuple[int, int | Array]:
    """(group index, layer within the group); the latter may be traced."""
    groups = spec.groups
    if isinstance(layer, tuple):
        names = [group.name for group in groups]
        if len(layer) != 2 or layer[0] not in names:
            raise ValueError(f"{layer=} names no group of this cache; pass (one of {names}, index within the group)")
        index, within = names.index(layer[0]), as_layer(layer[1])
    elif not isinstance(within := as_layer(layer), int):
        if len(groups) > 1:
            raise ValueError("with several groups a traced layer must be given as (group name, index within the group)")
        index = 0
    else:
        index, within = spec.locate(within)
    if isinstance(within, int) and not 0 <= within < len(groups[index].layers):
        raise ValueError(f"{layer=}: group {groups[index].name!r} has layers 0…{len(groups[index].layers) - 1}")
    return index, within


def as_layer(layer: Any) -> int | Int32[Array, ""]:
    """A layer number as an int, or as an int32 scalar if it is traced; ValueError for anything else."""
    if isinstance(layer, jax.core.Tracer):
        return integers("layer", layer, (), "a number of a layer")
    if isinstance(layer, jax.Array):
        layer = integers("layer", layer, (), "a number of a layer").item()
    return static_size("layer", layer, least=0)


def check_tensors(group: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Array]) -> None:
    """ValueError unless the tensors have these names and shapes."""
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        raise ValueError(f"group {group!r} takes tensors of shapes {dict(expected)}, got {got}")


def check_queries(q: Any, grant: Grant) -> Float[Array, "packed q_heads key_dim"]:
    """The queries as an array; ValueError unless there is one of floats for each packed token."""
    q = jnp.asarray(q)
    if q.ndim != 3 or q.shape[0] != grant.packed or 0 in q.shape or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q has shape {q.shape} and dtype {q.dtype}; pass floats [packed={grant.packed}, q_heads, key_dim]"
        )
    return q


def check_sinks(sinks: Any, q: Array) -> Float32[Array, " q_heads"] | None:
    """The sinks in float32; ValueError unless there is one for each query head."""
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != q.shape[1:2] or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks: {sinks.shape=}, {sinks.dtype=}; pass one float for each of the {q.shape[1]} query heads"
        )
    return sinks.astype(jnp.float32)


def check_grant(rows: int, grant: Grant) -> None:
    """ValueError unless the grant is of so many rows."""
    if grant.rows != rows:
        raise ValueError(
            f"the grant is of {grant.rows} rows and the cache has {rows}; pass the grant of its own reserve"
        )


def refuse_scales(kind: str, scales: Scales | None) -> None:
    """NotImplementedError if there are scales, for a kind of cache that is never quantised."""
    if scales is not None:
        raise NotImplementedError(f"a {kind} cache is not quantised; use kvjax.init, or leave scales out")
