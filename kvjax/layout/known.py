"""The named layouts: kvjax's own, and those of engines and kernels that its caches can be converted to and from.

Other engines keep one array a layer; here the layers are one axis, and `array[layer]` is what the engine calls its KV
cache.  Shapes and orders are the engines' documented ones (sources at each).  Only "k" and "v" follow a foreign order;
other tensors of a group stand alone in arrays of kvjax's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from kvjax.layout.page import TPU_LANES, PageLayout, canonical_layout
from kvjax.layout.schema import ArrayLayout, Layout, Scales, Shard, TensorPlace
from kvjax.spec import GroupSpec, TensorSpec

CANONICAL_ORDER = "(layer page) head token lane"
"""The order of every array of a `kvjax.KVCache`: see `kvjax.layout.page` for the reasons."""


def make_layout(
    name: str,
    group: GroupSpec,
    *,
    num_pages: int,
    page_size: int,
    shards: tuple[Shard, ...] = (),
    scales: Mapping[str, Scales] = MappingProxyType({}),
    **options: Any,
) -> Layout:
    """A named layout for a group's tensors.

    Args:
      name: one of `LAYOUTS`.
      group: the group; its layers, heads, widths and dtypes.
      num_pages: pages of the pool.
      page_size: token positions a page.
      shards: the axes split over a mesh.
      scales: for tensors that hold quantisation scales, what they scale.
      options: what the layout takes beyond that: `lane_multiple` of "kvjax".

    Raises:
      ValueError: an unknown name, or a layout that cannot hold these tensors; the message says why.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is not known; known: {', '.join(LAYOUTS)}")
    arrays = tuple(_with_scales(array, scales) for array in LAYOUTS[name](name, group, page_size, **options))
    return Layout(name, len(group.layers), num_pages, page_size, arrays, shards)


def layout_of(page: PageLayout, *, layers: int, num_pages: int, shards: tuple[Shard, ...] = ()) -> Layout:
    """The layout of a pool that a `KVCache` holds for one group, from its `PageLayout`."""
    return Layout("kvjax", layers, num_pages, page.page_size, _canonical_arrays(page), shards)


def _canonical_arrays(page: PageLayout) -> tuple[ArrayLayout, ...]:
    return tuple(
        ArrayLayout(
            pool.name,
            CANONICAL_ORDER,
            tuple(TensorPlace(name, pool.heads, end - start, lane=start) for name, start, end in pool.slices),
            pool.dtype,
            pool.lanes,
        )
        for pool in page.pools
    )


def _kvjax(name: str, group: GroupSpec, page_size: int, *, lane_multiple: int = 1) -> tuple[ArrayLayout, ...]:
    return _canonical_arrays(canonical_layout(group, page_size, lane_multiple=lane_multiple))


def _stacked(order: str) -> Callable[..., tuple[ArrayLayout, ...]]:
    """K and V of equal width in one array, told apart by the kv axis."""

    def arrays(name: str, group: GroupSpec, page_size: int) -> tuple[ArrayLayout, ...]:
        k, v = _equal_pair(name, group)
        return (_stack(k, v, order, k.width), *_others(group))

    return arrays


def _separate(key_order: str, value_order: str | None = None) -> Callable[..., tuple[ArrayLayout, ...]]:
    """An array for K and one for V."""

    def arrays(name: str, group: GroupSpec, page_size: int) -> tuple[ArrayLayout, ...]:
        k, v = _pair(name, group)
        return (_alone(k, key_order), _alone(v, value_order or key_order), *_others(group))

    return arrays


def _vllm_packed(name: str, group: GroupSpec, page_size: int) -> tuple[ArrayLayout, ...]:
    """vLLM's first paged kernel: K in vectors of 16 bytes with tokens between them, V with tokens innermost.

    key_cache `[blocks, heads, head_size / x, block_size, x]`, value_cache `[blocks, heads, head_size, block_size]`
    (vllm/attention/ops/paged_attn.py).
    """
    k, v = _pair(name, group)
    vector = max(1, 16 // np.dtype(k.dtype).itemsize)
    if k.width % vector:
        raise ValueError(f"layout {name!r} cuts keys in vectors of {vector}; {k.width=} is no multiple of it")
    order = f"layer page head lane/{vector} token lane%{vector}"
    return (_alone(k, order), _alone(v, "layer page head lane token"), *_others(group))


def _tpu_inference(name: str, group: GroupSpec, page_size: int) -> tuple[ArrayLayout, ...]:
    """tpu-inference's ragged paged attention v3: heads packed into 32-bit words, lanes padded to 128.

    `[pages, page_size, 2·heads / packing, packing, lanes]` with K and V of a head side by side on the combined axis
    (tpu_inference/kernels/ragged_paged_attention/v3/kernel.py); for head_dim 64 `[pages, page_size, heads / packing,
    packing, 128]` with K and V side by side in the lanes (kernel_hd64.py).
    """
    k, v = _equal_pair(name, group)
    packing = max(1, 4 // np.dtype(k.dtype).itemsize)
    if k.width == TPU_LANES // 2:
        order = f"layer page token head/{packing} head%{packing} lane"
        places = (TensorPlace("k", k.heads, k.width), TensorPlace("v", v.heads, v.width, lane=k.width))
        return (ArrayLayout("kv", order, places, k.dtype, TPU_LANES), *_others(group))
    pairs = packing // 2
    combined = f"head/{pairs} (head%{pairs} kv)" if pairs else "(head kv) ()"
    lanes = -(-k.width // TPU_LANES) * TPU_LANES
    return (_stack(k, v, f"layer page token {combined} lane", lanes), *_others(group))


LAYOUTS: Mapping[str, Callable[..., tuple[ArrayLayout, ...]]] = MappingProxyType(
    {
        "kvjax": _kvjax,
        # vLLM, vllm/v1/attention/backends/flash_attn.py: [2, blocks, block_size, heads, head_size], and the same
        # with heads before tokens in memory.
        "vllm_nhd": _stacked("layer kv page token head lane"),
        "vllm_hnd": _stacked("layer kv page head token lane"),
        "vllm_packed": _vllm_packed,
        # FlashInfer, docs.flashinfer.ai, append_paged_kv_cache: [pages, 2, page_size, heads, dim] and
        # [pages, 2, heads, page_size, dim].
        "flashinfer_nhd": _stacked("layer page kv token head lane"),
        "flashinfer_hnd": _stacked("layer page kv head token lane"),
        "tpu_inference": _tpu_inference,
        # jax.experimental.pallas.ops.tpu.paged_attention: k_pages and v_pages [heads, pages, page_size, dim].
        "jax_paged_attention": _separate("layer head page token lane"),
        # Pages as consecutive token positions of one long array: [slots, heads, dim] a layer.
        "token_major": _separate("layer (page token) head lane"),
    }
)
"""By name: (name, group, page_size) → the arrays of the layout."""


def _pair(name: str, group: GroupSpec) -> tuple[TensorSpec, TensorSpec]:
    k, v = group.tensor("k"), group.tensor("v")
    if (k.heads, k.dtype) != (v.heads, v.dtype):
        raise ValueError(
            f"layout {name!r}: k and v of group {group.name!r} differ in heads or dtype; use layout 'kvjax'"
        )
    return k, v


def _equal_pair(name: str, group: GroupSpec) -> tuple[TensorSpec, TensorSpec]:
    k, v = _pair(name, group)
    if k.width != v.width:
        raise ValueError(
            f"layout {name!r}: keys of width {k.width} and values of width {v.width} do not share its axes; use "
            "'kvjax', 'jax_paged_attention', 'token_major' or 'vllm_packed'"
        )
    return k, v


def _stack(k: TensorSpec, v: TensorSpec, order: str, lanes: int) -> ArrayLayout:
    places = (TensorPlace("k", k.heads, k.width, kv=0), TensorPlace("v", v.heads, v.width, kv=1))
    return ArrayLayout("kv", order, places, k.dtype, lanes, kvs=2)


def _alone(tensor: TensorSpec, order: str) -> ArrayLayout:
    place = TensorPlace(tensor.name, tensor.heads, tensor.width)
    return ArrayLayout(tensor.name, order, (place,), tensor.dtype, tensor.width)


def _others(group: GroupSpec) -> list[ArrayLayout]:
    return [_alone(tensor, CANONICAL_ORDER) for tensor in group.tensors if tensor.name not in ("k", "v")]


def _with_scales(array: ArrayLayout, scales: Mapping[str, Scales]) -> ArrayLayout:
    return replace(array, tensors=tuple(replace(t, scales=scales.get(t.name)) for t in array.tensors))
