"""The cache: page tables and pools of all groups, and the calls that model code makes.

    cache, grant = kvjax.reserve(cache, tokens, max_tokens=T)
    for layer in range(layers):
        cache = kvjax.write(cache, layer, grant, k=k, v=v)
        out = kvjax.attend(cache, layer, grant, q)
    cache = kvjax.commit(cache, grant.tokens)

Everything traces, inside `lax.scan` and `while_loop` too, and works in place when the cache is donated.  Each call
dispatches on the kind of cache, so that the same model runs on `ContiguousCache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Shaped

from kvjax import pages
from kvjax.attention.paged import Backend, choose_backend, paged_attention
from kvjax.grant import Grant, make_grant
from kvjax.layout import TPU_LANES, PageLayout, PoolLayout, canonical_layout
from kvjax.pages import Fault, GroupShape, PageTable, Status
from kvjax.spec import CacheSpec
from kvjax.storage import Pool, append_tokens, copy_pages
from pallas_kernels.hardware import TpuFacts

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
    """

    table: PageTable
    pools: tuple[dict[str, Pool], ...]
    spec: CacheSpec = field(metadata={"static": True})
    layouts: tuple[PageLayout, ...] = field(metadata={"static": True})
    backend: Backend = field(metadata={"static": True})

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


def init(
    spec: CacheSpec,
    *,
    rows: int,
    num_pages: int | Sequence[int],
    page_size: int | Sequence[int] = 16,
    max_context: int,
    max_epochs: int = 16,
    backend: Backend | None = None,
    mesh: Mesh | None = None,
    shardings: PartitionSpec | None = None,
) -> KVCache:
    """An empty cache; its pools are zeroed on the device.

    Args:
      spec: what the model caches.
      rows: sequences that can be live at once.
      num_pages: pages of each group's pool (one number for all, or one a group).
      page_size: token positions a page, likewise.
      max_context: the most positions a row may hold; rounded up to whole pages.
      max_epochs: steps that may be in flight between `advance` calls; a power of two.
      backend: which code attends: "xla", or the facts of a chip from `pallas_kernels.hardware`; None asks the device.
      mesh: devices to spread the pools over.  Aliasing under donation needs shardings from the start.
      shardings: how a pool `[layers · pages, heads, page_size, lanes]` lies on the mesh; heads over its last axis if
        None.  Only heads may be split.

    Raises:
      ValueError: a size below 1, or sizes that do not fit 32-bit positions, or heads the mesh does not divide.
      NotImplementedError: sliding-window groups, or kernels over a mesh; the message says what to use instead.
    """
    groups = len(spec.groups)
    num_pages = (num_pages,) * groups if isinstance(num_pages, int) else tuple(num_pages)
    page_size = (page_size,) * groups if isinstance(page_size, int) else tuple(page_size)
    if len(num_pages) != groups or len(page_size) != groups:
        raise ValueError(f"{num_pages=} and {page_size=} must be one number, or one for each of {groups} groups")
    if max_context < 1 or min(page_size) < 1:
        raise ValueError(f"{max_context=} and {page_size=} must be at least 1")
    for group in spec.groups:
        if group.window is not None:
            raise NotImplementedError(
                f"group {group.name!r} has window={group.window}: pages behind a window are not dropped yet; "
                "leave window=None while contexts stay within it"
            )
    backend = choose_backend() if backend is None else backend
    on_tpu = isinstance(backend, TpuFacts)
    if mesh is not None and backend != "xla":
        raise NotImplementedError('the kernels do not run over a mesh yet; pass backend="xla"')

    layouts = tuple(
        canonical_layout(group, size, lane_multiple=TPU_LANES if on_tpu else 1)
        for group, size in zip(spec.groups, page_size, strict=True)
    )
    shapes = []
    for number, size in zip(num_pages, page_size, strict=True):
        width = -(-max_context // size)
        # The TPU kernel reads the table in slices of whole lanes and would copy a table of another width.
        shapes.append(GroupShape(number, size, -(-width // TPU_LANES) * TPU_LANES if on_tpu else width))
    build = partial(_build, spec, layouts, tuple(shapes), rows, max_epochs, backend)
    if mesh is None:
        if shardings is not None:
            raise ValueError(f"{shardings=} needs a mesh; pass mesh=")
        return jax.jit(build)()
    return jax.jit(build, out_shardings=_shardings(jax.eval_shape(build), mesh, shardings))()


def _build(
    spec: CacheSpec,
    layouts: tuple[PageLayout, ...],
    shapes: tuple[GroupShape, ...],
    rows: int,
    max_epochs: int,
    backend: Backend,
) -> KVCache:
    def zeros(layers: int, num_pages: int, page_size: int, pool: PoolLayout) -> Pool:
        return jnp.zeros((layers * num_pages, pool.heads, page_size, pool.lanes), pool.dtype)

    return KVCache(
        table=pages.make_page_table(shapes, rows=rows, max_epochs=max_epochs),
        pools=tuple(
            {pool.name: zeros(len(group.layers), shape.num_pages, shape.page_size, pool) for pool in layout.pools}
            for group, layout, shape in zip(spec.groups, layouts, shapes, strict=True)
        ),
        spec=spec,
        layouts=layouts,
        backend=backend,
    )


def _shardings(cache: KVCache, mesh: Mesh, pool_spec: PartitionSpec | None) -> KVCache:
    """The cache's tree with a sharding in place of each array: pools by heads, the table on every device."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"mesh has axis types {mesh.axis_types}; make it with axis_types=(AxisType.Auto, …)")
    pool_spec = PartitionSpec(None, mesh.axis_names[-1]) if pool_spec is None else pool_spec
    if any(entry is not None for axis, entry in enumerate(pool_spec) if axis != 1):
        raise ValueError(f"shardings={pool_spec} splits an axis other than heads; pages and tokens must stay whole")
    sharding = NamedSharding(mesh, pool_spec)
    for group in cache.pools:
        for name, pool in group.items():
            try:
                sharding.shard_shape(pool.shape)
            except ValueError as error:
                raise ValueError(
                    f"the {pool.shape[1]} heads of pool {name!r} do not split over {mesh.shape}"
                ) from error
    replicated = NamedSharding(mesh, PartitionSpec())
    return replace(
        cache,
        table=jax.tree.map(lambda _: replicated, cache.table),
        pools=jax.tree.map(lambda _: sharding, cache.pools),
    )


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
def write(cache: Any, layer: Layer, grant: Grant, **tensors: Shaped[Array, "packed heads width"]) -> Any:
    """Writes a layer's tensors for every granted token, by name: `write(cache, layer, grant, k=k, v=v)`.

    Args:
      cache: the cache; donate it.
      layer: the layer; may be traced.
      grant: from `reserve`.
      tensors: all tensors of the layer's group, cast to the cache's dtype.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@singledispatch
def attend(
    cache: Any, layer: Layer, grant: Grant, q: Float[Array, "packed q_heads key_dim"], *, scale: float | None = None
) -> Float[Array, "packed q_heads value_dim"]:
    """Causal attention of every granted token over its row, itself included; zeros in padding.

    Args:
      cache: the cache, with this layer's tensors of the granted tokens written.
      layer: the layer; may be traced.
      grant: from `reserve`.
      q: queries, one a granted token; q_heads is a multiple of the cached heads, which consecutive queries share.
      scale: multiplies the logits; key_dim ** −0.5 if None.
    """
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
def advance(cache: Any, completed: Int32[Array, ""] | None = None) -> Any:
    """Closes the epoch and frees the pages dropped up to the end of epoch `completed`; O(1).

    None means the open one: right when all steps run on one stream in the order they were enqueued.
    """
    raise TypeError(f"{type(cache).__name__} is not a kvjax cache")


@reserve.register
def _(
    cache: KVCache, tokens: Int32[Array, " rows"], *, max_tokens: int, order: Int32[Array, " rows"] | None = None
) -> tuple[KVCache, Grant]:
    table, info = pages.reserve(cache.table, tokens, max_tokens=max_tokens, order=order)
    pools = tuple(
        {name: copy_pages(pool, group.num_pages, copy.source, copy.target) for name, pool in arrays.items()}
        for arrays, group, copy in zip(cache.pools, table.groups, info.copies, strict=True)
    )
    copies = jnp.int32(0)
    for group, copy in zip(table.groups, info.copies, strict=True):
        copies += jnp.sum(copy.source < group.num_pages, dtype=jnp.int32)
    grant = make_grant(info.tokens, info.status, cache.table.length, max_tokens, copies)
    return replace(cache, table=table, pools=pools), grant


@write.register
def _(cache: KVCache, layer: Layer, grant: Grant, **tensors: Array) -> KVCache:
    index, within = _locate(cache, layer)
    group, spec, layout = cache.table.groups[index], cache.spec.groups[index], cache.layouts[index]
    _check_tensors(spec.name, {t.name: (grant.packed, t.heads, t.width) for t in spec.tensors}, tensors)
    logical = grant.position // group.page_size
    page = group.pages.at[grant.row, logical % group.width].get(mode="fill", fill_value=group.num_pages)
    page = jnp.where(page < group.num_pages, within * group.num_pages + page, len(spec.layers) * group.num_pages)
    offset = grant.position % group.page_size
    arrays = {
        pool.name: append_tokens(cache.pools[index][pool.name], pool, page, offset, tensors) for pool in layout.pools
    }
    return replace(cache, pools=(*cache.pools[:index], arrays, *cache.pools[index + 1 :]))


@attend.register
def _(
    cache: KVCache,
    layer: Layer,
    grant: Grant,
    q: Float[Array, "packed q_heads key_dim"],
    *,
    scale: float | None = None,
) -> Float[Array, "packed q_heads value_dim"]:
    index, within = _locate(cache, layer)
    group, layout = cache.table.groups[index], cache.layouts[index].pools[0]
    return paged_attention(
        q,
        grant,
        cache.pools[index][layout.name],
        layout,
        group.pages,
        within * group.num_pages,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        backend=cache.backend,
    )


@commit.register
def _(cache: KVCache, tokens: Int32[Array, " rows"]) -> KVCache:
    table, info = pages.commit(cache.table, tokens)
    refused = jnp.any(info.status != Status.OK)
    faults = table.faults | jnp.where(refused, jnp.int32(Fault.COMMIT_REFUSED), 0)
    return replace(cache, table=replace(table, faults=faults))


@release.register
def _(cache: KVCache, rows: Bool[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    table, info = pages.release(cache.table, rows, max_pages=max_pages)
    return replace(cache, table=table), info.status


@advance.register
def _(cache: KVCache, completed: Int32[Array, ""] | None = None) -> KVCache:
    table, _ = pages.advance(cache.table, cache.table.epoch if completed is None else completed)
    return replace(cache, table=table)


def truncate(
    cache: KVCache, length: Int32[Array, " rows"], *, max_pages: int, rows: Bool[Array, " rows"] | None = None
) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Rewinds rows to `length` committed tokens and gives back what lies beyond; see `pages.truncate`."""
    table, info = pages.truncate(cache.table, length, max_pages=max_pages, rows=rows)
    return replace(cache, table=table), info.status


def fork(cache: KVCache, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Empty rows share a parent's committed pages until they write; see `pages.fork`."""
    table, info = pages.fork(cache.table, parent, max_pages=max_pages)
    return replace(cache, table=table), info.status


def reorder(cache: KVCache, parent: Int32[Array, " rows"], *, max_pages: int) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Every row takes its parent's pages at once, for beam search; see `pages.reorder`."""
    table, info = pages.reorder(cache.table, parent, max_pages=max_pages)
    return replace(cache, table=table), info.status


def adopt(
    cache: KVCache,
    pages_of_groups: Sequence[Int32[Array, "rows prefix_pages"]],
    tokens: Int32[Array, " rows"],
    *,
    max_pages: int,
) -> tuple[KVCache, Int32[Array, " rows"]]:
    """Empty rows map pages that somebody holds: a prefix hit; see `pages.adopt`."""
    table, info = pages.adopt(cache.table, pages_of_groups, tokens, max_pages=max_pages)
    return replace(cache, table=table), info.status


def pin(
    cache: KVCache, pages_of_groups: Sequence[Int32[Array, " ids"]]
) -> tuple[KVCache, tuple[Int32[Array, " ids"], ...]]:
    """Holds pages without a row; see `pages.pin`."""
    table, info = pages.pin(cache.table, pages_of_groups)
    return replace(cache, table=table), info.status


def unpin(
    cache: KVCache, pages_of_groups: Sequence[Int32[Array, " ids"]]
) -> tuple[KVCache, tuple[Int32[Array, " ids"], ...]]:
    """Lets go of pages that `pin` held; see `pages.unpin`."""
    table, info = pages.unpin(cache.table, pages_of_groups)
    return replace(cache, table=table), info.status


def _locate(cache: KVCache, layer: Layer) -> tuple[int, int | Array]:
    """(group index, layer within the group); the latter may be traced."""
    if isinstance(layer, tuple):
        name, within = layer
        names = [group.name for group in cache.spec.groups]
        if name not in names:
            raise ValueError(f"{layer=} names no group of this cache; it has {names}")
        return names.index(name), within
    if not isinstance(layer, jax.Array):
        return cache.spec.locate(int(layer))
    if len(cache.spec.groups) > 1:
        raise ValueError("with several groups a traced layer must be given as (group name, index within the group)")
    return 0, layer


def _check_tensors(group: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Array]) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        raise ValueError(f"group {group!r} takes tensors of shapes {dict(expected)}, got {got}")
