"""Conversions: every pair gives exactly the other layout's arrays, bit by bit, in place where that can be."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.layout import LAYOUTS, Layout, Shard, make_layout
from kvjax.storage import convert, plan_conversion
from kvjax.storage.convert import convert_planned
from tests.layout.foreign import Geometry, foreign_arrays
from tests.layout.test_address import SCALED, SCALES, TAKE_UNEQUAL

IN_PLACE = ({"kvjax", "flashinfer_nhd", "flashinfer_hnd"}, {"vllm_packed", "token_major"}, {"tpu_inference"})
"""Layouts with the same arrays, of equal size, whose pages lie in one piece."""


def layout_of(name: str, geometry: Geometry) -> Layout:
    return make_layout(name, geometry.group, num_pages=geometry.num_pages, page_size=geometry.page_size)


@cache
def arrays_of(name: str, geometry: Geometry) -> dict[str, np.ndarray]:
    return foreign_arrays(name, **geometry.tensors())


def on_device(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.array(array) for name, array in arrays.items()}


def assert_same_bits(got, expected) -> None:
    assert {n: (a.shape, a.dtype) for n, a in got.items()} == {n: (a.shape, a.dtype) for n, a in expected.items()}
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), array.view(np.uint8), err_msg=name)


def assert_converts(source: str, target: str, geometry: Geometry, slab_bytes: int) -> None:
    pool, layouts = on_device(arrays_of(source, geometry)), [layout_of(name, geometry) for name in (source, target)]
    assert_same_bits(convert(pool, *layouts, slab_bytes=slab_bytes), arrays_of(target, geometry))


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_pair(source):
    """Both directions of every pair, padding included; so there and back is the identity."""
    for target in LAYOUTS:
        assert_converts(source, target, Geometry(dtype="bfloat16"), slab_bytes=1)
        plan = plan_conversion(layout_of(source, Geometry()), layout_of(target, Geometry()))
        assert plan.in_place == any({source, target} <= family for family in IN_PLACE), target


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape(data):
    """Pairs, sizes, dtypes and slabs at random."""
    size = st.integers(1, 5)
    width = data.draw(st.sampled_from((16, 32, 64, 144)))
    unequal = data.draw(st.booleans())
    names = st.sampled_from(TAKE_UNEQUAL if unequal else tuple(LAYOUTS))
    geometry = Geometry(
        layers=data.draw(st.integers(1, 3)),
        num_pages=data.draw(size),
        page_size=data.draw(size),
        heads=data.draw(size),
        key_dim=width,
        value_dim=width // 2 if unequal else width,
        dtype=data.draw(st.sampled_from(("float32", "bfloat16", "int8", "float8_e4m3fn"))),
    )
    assert_converts(data.draw(names), data.draw(names), geometry, data.draw(st.sampled_from((1, 4000, 1 << 20))))


def test_another_arrangement_of_equal_shape_is_noticed():
    geometry = Geometry(heads=4)
    swapped = arrays_of("flashinfer_hnd", geometry)
    with pytest.raises(AssertionError, match="kv"):
        assert_same_bits(on_device(arrays_of("flashinfer_nhd", geometry)), swapped)


@pytest.mark.parametrize("target", ["flashinfer_nhd", "vllm_packed", "jax_paged_attention"])
def test_memory(target):
    """In place: the pool is aliased and temporaries are a few slabs.  Streamed: no more than the reported peak."""
    geometry = Geometry(layers=2, num_pages=512, page_size=16, heads=4, key_dim=32, value_dim=32)
    source, target = layout_of("kvjax", geometry), layout_of(target, geometry)
    plan = plan_conversion(source, target, slab_bytes=1 << 16)
    pool = {array.name: jax.ShapeDtypeStruct(source.shape(array), array.dtype) for array in source.arrays}
    function = jax.jit(partial(convert_planned, plan=plan), donate_argnums=(0,) if plan.in_place else ())
    memory = function.lower(pool).compile().memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert total - memory.alias_size_in_bytes <= plan.peak_bytes
    assert memory.temp_size_in_bytes <= 4 * plan.slab_bytes < source.nbytes // 8
    assert memory.alias_size_in_bytes == (source.nbytes if plan.in_place else 0)
    assert not plan_conversion(source, target, platform="tpu").in_place


def test_in_place_is_the_same_memory():
    geometry = Geometry(num_pages=64)
    pool = on_device(arrays_of("kvjax", geometry))
    before = pool["kv"].unsafe_buffer_pointer()
    out = convert(pool, layout_of("kvjax", geometry), layout_of("flashinfer_nhd", geometry))
    assert out["kv"].unsafe_buffer_pointer() == before
    assert pool["kv"].is_deleted()
    assert_same_bits(out, arrays_of("flashinfer_nhd", geometry))


def test_scales_and_side_tensors_ride_along():
    names = ("kvjax", "vllm_packed", "tpu_inference", "jax_paged_attention")
    layouts = [make_layout(name, SCALED, num_pages=3, page_size=8, scales=SCALES) for name in names]
    draw = np.random.default_rng(0)
    first = {a.name: draw.integers(1, 100, layouts[0].shape(a)).astype(a.dtype) for a in layouts[0].arrays}
    for layout in layouts[1:]:
        there = convert(on_device(first), layouts[0], layout)
        np.testing.assert_array_equal(there["k_scale"], first["k_scale"])
        assert_same_bits(convert(there, layout, layouts[0]), first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_byte_order(dtype):
    geometry = Geometry(dtype=dtype)
    source, target = layout_of("kvjax", geometry), replace(layout_of("vllm_hnd", geometry), byte_order="big")
    out = convert(on_device(arrays_of("kvjax", geometry)), source, target)
    size = np.dtype(dtype).itemsize
    turned = np.asarray(out["kv"]).view(np.uint8).reshape(-1, size)[:, ::-1]
    np.testing.assert_array_equal(turned, arrays_of("vllm_hnd", geometry)["kv"].view(np.uint8).reshape(-1, size))


def test_pairs_that_would_lose_something_are_refused_by_name():
    base = Geometry()
    source = layout_of("kvjax", base)
    for other, message in (
        (replace(base, dtype="bfloat16"), "'k' is float32 and bfloat16; converting values would lose bits"),
        (replace(base, heads=2), "'k' has other heads"),
        (replace(base, key_dim=8, value_dim=8), "'k' has other heads, width"),
        (replace(base, page_size=8), "page_size: 4 and 8"),
        (replace(base, num_pages=6), "num_pages: 5 and 6"),
        (replace(base, layers=1), "layers: 2 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_conversion(source, layout_of("vllm_nhd", other))
    scaled = make_layout("kvjax", SCALED, num_pages=3, page_size=8, scales=SCALES)
    plain = make_layout("kvjax", SCALED, num_pages=3, page_size=8)
    with pytest.raises(ValueError, match="'k_scale' has other heads, width or scales"):
        plan_conversion(scaled, plain)
    with pytest.raises(ValueError, match="different tensors"):
        plan_conversion(
            make_layout("kvjax", replace(SCALED, tensors=SCALED.tensors[:2]), num_pages=3, page_size=8), plain
        )
    split = replace(layout_of("kvjax", replace(base, heads=4)), shards=(Shard("head", "tensor", 2),))
    with pytest.raises(ValueError, match="split differently"):
        plan_conversion(split, layout_of("vllm_nhd", replace(base, heads=4)))
    with pytest.raises(ValueError, match="pass mesh="):
        convert(on_device(arrays_of("kvjax", replace(base, heads=4))), split, split)
    with pytest.raises(ValueError, match="pool holds arrays"):
        convert(on_device(arrays_of("vllm_nhd", base)), source, source)


SHARDED = """
import jax, numpy as np
from dataclasses import replace
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kvjax.layout import Shard, address
from kvjax.storage import convert
from tests.layout.foreign import Geometry, foreign_arrays
from tests.layout.test_convert import assert_same_bits, layout_of
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
geometry = Geometry(heads=4)
split = {n: replace(layout_of(n, geometry), shards=(Shard("head", "tensor", 2),))
         for n in ("kvjax", "tpu_inference", "flashinfer_nhd", "jax_paged_attention")}
def placed(name):
    layout = split[name]
    arrays = foreign_arrays(name, **geometry.tensors())
    return {a.name: jax.device_put(arrays[a.name], NamedSharding(mesh, PartitionSpec(*layout.partition(a))))
            for a in layout.arrays}
for source in split:
    for target in split:
        out = convert(placed(source), split[source], split[target], mesh=mesh)
        assert_same_bits(out, foreign_arrays(target, **geometry.tensors()))
        for array in split[target].arrays:
            got = out[array.name]
            wanted = NamedSharding(mesh, PartitionSpec(*split[target].partition(array)))
            assert got.sharding.is_equivalent_to(wanted, got.ndim), (source, target, got.sharding)
            place = address(split[target], 1, array.tensors[0].name, 3, 7, 5)
            shard = np.asarray(got.addressable_shards[place.shard[0]].data).reshape(-1)
            assert shard[place.element] == geometry.tensors()[array.tensors[0].name][1, 1, 3, 3, 5]
print("shards convert where they are")
"""


def test_each_device_converts_its_own_shard():
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, "-c", SHARDED]
    done = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "where they are" in done.stdout, done.stderr[-3000:]
