"""Moving a pool from one layout to another, slab by slab.

A slab is a run of pages of one layer.  It is taken apart into plain tensors `[pages, tokens, heads, width]` and put
together in the other order; temporaries are a few slabs, never a pool.  Where an array keeps its pages in one piece and
in the same place in both layouts, its slabs go back to where they came from: the conversion is in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from kvjax.layout.schema import ArrayLayout, Layout
from kvjax.storage.slabs import Index, Tensors, box, pack, unpack

SLAB_BYTES = 4 << 20
"""Bytes of source pages that are moved at a time."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a pool gets from one layout to another.

    Attributes:
      source, target: the layouts.
      in_place: every array's bytes stay within their page, and the source's memory becomes the target's.
      slab_pages: pages moved at a time.
      slab_bytes: bytes of a slab in the larger of the two layouts.
    """

    source: Layout
    target: Layout
    in_place: bool
    slab_pages: int
    slab_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arrays that live at the peak, on one device: the pools, and four slabs under way."""
        pools = self.source.local.nbytes + (0 if self.in_place else self.target.local.nbytes)
        return pools + 4 * self.slab_bytes


def plan_conversion(
    source: Layout, target: Layout, *, slab_bytes: int = SLAB_BYTES, platform: str | None = None
) -> Conversion:
    """How `convert` goes about it.

    Never in place on TPU: memory there is tiled by the last two axes, and the flat view of pages that an exchange in
    place needs would be a copy of the whole pool, which costs as much as the target.

    Args:
      source, target: the layouts.
      slab_bytes: bytes moved at a time.
      platform: "cpu", "gpu" or "tpu"; None asks JAX for its default.

    Raises:
      ValueError: layouts of different tensors, sizes or shards: converting would lose or invent something; the message
        names it.
    """
    _check_equal(source, target)
    page = max(_page_bytes(layout.local) for layout in (source, target))
    slab_pages = max(1, min(source.local.num_pages, slab_bytes // page))
    platform = jax.default_backend() if platform is None else platform
    in_place = platform != "tpu" and _stays_in_pages(source.local, target.local)
    return Conversion(source, target, in_place, slab_pages, slab_pages * page)


def convert(
    pool: Mapping[str, Array],
    source: Layout,
    target: Layout,
    *,
    mesh: Mesh | None = None,
    slab_bytes: int = SLAB_BYTES,
) -> dict[str, Array]:
    """A pool's tensors in another layout.  Jitted; where the conversion is in place, `pool` is donated and gone.

    Padding of the target is zero.  Every element keeps its bits; a slot keeps its number, so page tables stay valid.
    Each device converts its own shard.

    Args:
      pool: arrays by name, of the source's shapes.
      source, target: the layouts; `plan_conversion` says what a conversion costs.
      mesh: the mesh, where the layouts have shards.
      slab_bytes: bytes moved at a time.

    Raises:
      ValueError: layouts that `plan_conversion` refuses, arrays of another shape, or a missing mesh.
    """
    plan = plan_conversion(source, target, slab_bytes=slab_bytes)
    expected = {array.name: (source.shape(array), array.dtype) for array in source.arrays}
    got = {name: (array.shape, array.dtype.name) for name, array in pool.items()}
    if got != expected:
        raise ValueError(f"pool holds arrays {got}; layout {source.name!r} has {expected}")
    if source.shards and mesh is None:
        raise ValueError(f"layout {source.name!r} is split over {source.shards}; pass mesh=")
    if source == target:
        return dict(pool)
    return (_convert_donated if plan.in_place else _convert_copied)(dict(pool), plan, mesh)


def convert_planned(pool: dict[str, Array], plan: Conversion, mesh: Mesh | None = None) -> dict[str, Array]:
    """`convert` without its checks, to be jitted: donate `pool` if the plan is in place."""
    local = partial(_convert_shard, plan=plan)
    if not plan.source.shards:
        return local(pool)
    specs = [
        {array.name: PartitionSpec(*layout.partition(array)) for array in layout.arrays}
        for layout in (plan.source, plan.target)
    ]
    return jax.shard_map(local, mesh=mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False)(pool)


_convert_donated = jax.jit(convert_planned, static_argnames=("plan", "mesh"), donate_argnames="pool")
_convert_copied = jax.jit(convert_planned, static_argnames=("plan", "mesh"))


def _convert_shard(pool: dict[str, Array], plan: Conversion) -> dict[str, Array]:
    source, target = plan.source.local, plan.target.local
    if plan.in_place:
        pairs = [(array, target.tensor(array.tensors[0].name)[0]) for array in source.arrays]
        return {new.name: _rearrange(pool[old.name], plan, old, new) for old, new in pairs}

    def move(layer: Index, page: Index, count: int, out: dict[str, Array]) -> dict[str, Array]:
        tensors: Tensors = {}
        for array in source.arrays:
            start, size = box(source.dims(array), layer, page, count)
            slab = _row_major(lax.dynamic_slice(pool[array.name], start, size))
            tensors |= unpack(slab, source, array, count)
        slabs = {}
        for array in target.arrays:
            start, size = box(target.dims(array), layer, page, count)
            slab = _row_major(pack(_in_byte_order(tensors, plan), target, array, count).reshape(size))
            slabs[array.name] = lax.dynamic_update_slice(out[array.name], slab, start)
        return slabs

    out = {array.name: jnp.zeros(target.shape(array), array.dtype) for array in target.arrays}
    return _for_slabs(move, source.layers, source.num_pages, plan.slab_pages, out)


def _row_major(slab: Array) -> Array:
    """The slab, laid out as its axes run.  XLA would otherwise lay out a whole pool to suit a slab's transposes."""
    return with_layout_constraint(slab, MemoryLayout(tuple(range(slab.ndim))))


def _rearrange(memory: Array, plan: Conversion, old: ArrayLayout, new: ArrayLayout) -> Array:
    """One array, in place.  Its pages lie one after another, so that a slab is a run of a flat array."""
    source, target = plan.source.local, plan.target.local
    number = source.layers * source.num_pages
    flat = memory.reshape(number, -1)

    def move(_: Index, page: Index, count: int, flat: Array) -> Array:
        slab = lax.dynamic_slice_in_dim(flat, page, count)
        tensors = _in_byte_order(unpack(slab, source, old, count), plan)
        return lax.dynamic_update_slice_in_dim(flat, pack(tensors, target, new, count).reshape(count, -1), page, 0)

    return _for_slabs(move, 1, number, plan.slab_pages, flat).reshape(target.shape(new))


def _for_slabs[State](
    move: Callable[[Index, Index, int, State], State], layers: int, num_pages: int, slab_pages: int, state: State
) -> State:
    """state = move(layer, first page, pages, state) for every slab; a layer's last one may be shorter."""
    whole, rest = divmod(num_pages, slab_pages)

    def step(index: Index, state: State) -> State:
        return move(index // whole, index % whole * slab_pages, slab_pages, state)

    state = lax.fori_loop(0, layers * whole, step, state)
    if rest:
        last = jnp.int32(whole * slab_pages)
        state = lax.fori_loop(0, layers, lambda layer, state: move(layer, last, rest, state), state)
    return state


def _in_byte_order(tensors: Tensors, plan: Conversion) -> Tensors:
    """The tensors with their bytes turned round, if the layouts differ in byte order."""
    if plan.source.byte_order == plan.target.byte_order:
        return tensors
    return {name: _swap_bytes(tensor) for name, tensor in tensors.items()}


def _swap_bytes(values: Array) -> Array:
    if values.dtype.itemsize == 1:
        return values
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.uint8)[..., ::-1], values.dtype)


def _stays_in_pages(source: Layout, target: Layout) -> bool:
    """Each array has a partner with the same tensors, and both keep pages whole, in the same place."""
    if len(source.arrays) != len(target.arrays):
        return False
    for old in source.arrays:
        new, _ = target.tensor(old.tensors[0].name)
        if {tensor.name for tensor in old.tensors} != {tensor.name for tensor in new.tensors}:
            return False
        if math.prod(source.shape(old)) != math.prod(target.shape(new)):
            return False
        for layout, array in ((source, old), (target, new)):
            axes = [factor.axis for dim in layout.dims(array) for factor in dim]
            if axes[: axes.index("page")] not in (["layer"], []) or "layer" in axes[axes.index("page") :]:
                return False
    return True


def _check_equal(source: Layout, target: Layout) -> None:
    """ValueError unless both hold the same elements."""
    pair = f"layouts {source.name!r} and {target.name!r}"
    for size in ("layers", "num_pages", "page_size"):
        ours, theirs = getattr(source, size), getattr(target, size)
        if ours != theirs:
            raise ValueError(f"{pair} differ in {size}: {ours} and {theirs}; make both of the same sizes")
    if source.shards != target.shards:
        raise ValueError(f"{pair} are split differently ({source.shards}, {target.shards}); reshard with device_put")
    if set(source.tensor_names) != set(target.tensor_names):
        raise ValueError(f"{pair} hold different tensors: {source.tensor_names} and {target.tensor_names}")
    for name in source.tensor_names:
        (old, mine), (new, other) = source.tensor(name), target.tensor(name)
        if (mine.heads, mine.width, mine.scales) != (other.heads, other.width, other.scales):
            raise ValueError(f"{pair}: tensor {name!r} has other heads, width or scales: {mine} and {other}")
        if old.dtype != new.dtype:
            raise ValueError(
                f"{pair}: tensor {name!r} is {old.dtype} and {new.dtype}; converting values would lose bits"
            )


def _page_bytes(layout: Layout) -> int:
    return layout.nbytes // (layout.layers * layout.num_pages)
