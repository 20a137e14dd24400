"""Making an empty cache: sizes, layouts, the backend, and where the pools lie on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax import pages
from kvjax.attention.paged import Backend, choose_backend
from kvjax.cache import KVCache
from kvjax.extents import ExtentOptions, ExtentShape, make_extents
from kvjax.inputs import INT32_MAX, static_size
from kvjax.layout import TPU_LANES, PageLayout, PoolLayout, canonical_layout
from kvjax.pages import GroupShape
from kvjax.spec import CacheSpec
from kvjax.storage import Pool
from pallas_kernels.arguments import HEAD_DIMS, PAGE_SIZES, QUANTISED_DTYPES, QUERY_DTYPES
from pallas_kernels.hardware import GpuFacts, TpuFacts
from pallas_kernels.tuned import Tuned, with_tuned


def init(
    spec: CacheSpec,
    *,
    rows: int,
    num_pages: int | Sequence[int],
    page_size: int | Sequence[int] = 16,
    max_context: int,
    max_epochs: int = 16,
    backend: Backend | None = None,
    tuned: Sequence[Tuned] = (),
    mesh: Mesh | None = None,
    shardings: PartitionSpec | None = None,
    extents: ExtentOptions | None = None,
) -> KVCache:
    """An empty cache; its pools are zeroed on the device.

    Args:
      spec: what the model caches.
      rows: sequences that can be live at once.
      num_pages: pages of each group's pool (one number for all, or one a group).
      page_size: token positions a page, likewise.
      max_context: the most positions a row may hold; rounded up to whole pages (on TPU, to 128 pages).
      max_epochs: see `pages.make_page_table`.
      backend: which code attends: "xla", or the facts of a chip from `pallas_kernels.hardware`; None asks the device.
      tuned: block sizes for the kernels, from `kvjax.attention.load_tuned`; other shapes than theirs go by the rule.
      mesh: devices to spread the pools over.  Aliasing under donation needs shardings from the start.
      shardings: how a pool `[layers · pages, heads, page_size, lanes]` lies on the mesh; heads over its last axis if
        None.  Only heads may be split.
      extents: keep the pages of a row side by side as far as that goes (`kvjax.extents`), so that a kernel may copy
        whole runs; None takes pages as they come.

    Raises:
      ValueError: a size below 1, a span larger than a pool, sizes that do not fit 32-bit positions, or heads the mesh
        does not divide; or block sizes tuned on another chip, or for shapes that no group has.
      TypeError: `extents` or `tuned` hold anything else.
      NotImplementedError: sliding-window groups, what the chosen kernels do not take, or kernels over a mesh; the
        message says what to use instead.
    """
    num_pages = _one_a_group("num_pages", num_pages, spec)
    page_size = _one_a_group("page_size", page_size, spec)
    max_context = static_size("max_context", max_context)
    for group, number in zip(spec.groups, num_pages, strict=True):
        if group.window is not None:
            raise NotImplementedError(
                f"group {group.name!r} has window={group.window}: pages behind a window are not dropped yet; "
                "leave window=None while contexts stay within it"
            )
        if len(group.layers) * number > INT32_MAX:
            raise ValueError(
                f"num_pages={number} × {len(group.layers)} layers exceeds {INT32_MAX}: page ids are 32 bits"
            )
    if extents is not None and not isinstance(extents, ExtentOptions):
        raise TypeError(f"extents={extents!r}; pass kvjax.extents.ExtentOptions(), or None")
    if wrong := [one for one in tuned if not isinstance(one, Tuned)]:
        raise TypeError(f"tuned holds {wrong[0]!r}; pass what kvjax.attention.load_tuned returns")
    backend = _backend_of(mesh) if backend is None else backend
    on_tpu = isinstance(backend, TpuFacts)
    if backend != "xla":
        _check_kernels(backend, spec, page_size)
        if mesh is not None:
            raise NotImplementedError('the kernels do not run over a mesh yet; pass backend="xla"')
        backend = _with_tuned(backend, spec, page_size, tuned)
    elif tuned:
        raise ValueError(f'block sizes tuned on {tuned[0].chip!r} and backend="xla", which has none; leave them out')

    layouts = tuple(
        canonical_layout(group, size, lane_multiple=TPU_LANES if on_tpu else 1)
        for group, size in zip(spec.groups, page_size, strict=True)
    )
    shapes = []
    for number, size in zip(num_pages, page_size, strict=True):
        width = -(-max_context // size)
        # The TPU kernel reads the table in slices of whole lanes and would copy a table of another width.
        shapes.append(GroupShape(number, size, -(-width // TPU_LANES) * TPU_LANES if on_tpu else width))
    extent_shapes = None
    if extents is not None:
        lanes = TPU_LANES if on_tpu else 1
        extent_shapes = tuple(extents.shape(shape, rows=rows, lane_multiple=lanes) for shape in shapes)
    build = partial(_build, spec, layouts, tuple(shapes), extent_shapes, rows, max_epochs, backend)
    if mesh is None:
        if shardings is not None:
            raise ValueError(f"{shardings=} needs a mesh; pass mesh=")
        return jax.jit(build)()
    return jax.jit(build, out_shardings=_shardings(jax.eval_shape(build), mesh, shardings))()


def _one_a_group(name: str, value: int | Sequence[int], spec: CacheSpec) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * len(spec.groups)
    if len(values) != len(spec.groups):
        raise ValueError(f"{name}={value} must be one number, or one for each of {len(spec.groups)} groups")
    return tuple(static_size(name, one) for one in values)


def _backend_of(mesh: Mesh | None) -> Backend:
    """The backend of the device that the cache will be on."""
    device = jax.config.jax_default_device if mesh is None else mesh.devices.flat[0]
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    return choose_backend(device.platform, device.device_kind)


def _check_kernels(backend: Backend, spec: CacheSpec, page_size: tuple[int, ...]) -> None:
    """What the decode kernels lack is refused before there is a cache, not at its first decode."""
    if not isinstance(backend, TpuFacts | GpuFacts):
        raise ValueError(f'{backend=} must be "xla" or the facts of a chip from pallas_kernels.hardware')
    dtypes = {*QUERY_DTYPES, *QUANTISED_DTYPES} - ({"float16"} if isinstance(backend, TpuFacts) else set())
    for group, size in zip(spec.groups, page_size, strict=True):
        widths = {tensor.name: tensor.width for tensor in group.tensors}
        kinds = {tensor.dtype for tensor in group.tensors}
        if set(widths) != {"k", "v"} or not {*widths.values()} <= {*HEAD_DIMS} or not kinds <= dtypes:
            raise NotImplementedError(
                f"group {group.name!r} caches {widths} in {sorted(kinds)}; the kernels of {backend.name} take k and v "
                f'of widths {HEAD_DIMS} in {", ".join(sorted(dtypes))}. Pass backend="xla"'
            )
        if size not in PAGE_SIZES:
            raise NotImplementedError(f'page_size={size}; the kernels take {PAGE_SIZES}, and backend="xla" any')


def _with_tuned(
    backend: TpuFacts | GpuFacts, spec: CacheSpec, page_size: tuple[int, ...], tuned: Sequence[Tuned]
) -> Backend:
    """The backend with these block sizes; ValueError for another chip's, or for those of a shape that no group has."""
    shapes = []
    for group, size in zip(spec.groups, page_size, strict=True):
        keys, values = group.tensor("k"), group.tensor("v")
        dims = {"kv_heads": keys.heads, "key_dim": keys.width, "value_dim": values.width}
        shapes.append({**dims, "page_size": size, "pool_dtype": keys.dtype})
    for one in tuned:
        measured = {name: getattr(one.shape, name) for name in shapes[0]}
        if measured not in shapes:
            raise ValueError(f"block sizes tuned for {measured}, and the cache has {shapes}; tune for its own shape")
    return with_tuned(backend, tuned)


def _build(
    spec: CacheSpec,
    layouts: tuple[PageLayout, ...],
    shapes: tuple[GroupShape, ...],
    extents: tuple[ExtentShape, ...] | None,
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
        extents=None if extents is None else tuple(make_extents(shape, rows) for shape in extents),
    )


def _shardings(cache: KVCache, mesh: Mesh, pool_spec: PartitionSpec | None) -> KVCache:
    """The cache's tree with a sharding in place of each array: pools by heads, the table on every device."""
    if pool_spec is not None and not isinstance(pool_spec, PartitionSpec):
        raise ValueError(f"shardings={pool_spec!r} must be a PartitionSpec of the pools' axes")
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
        extents=jax.tree.map(lambda _: replicated, cache.extents),
        pools=jax.tree.map(lambda _: sharding, cache.pools),
    )
