"""Every element of every layout stands where `address` says, in arrays built by other means."""

import itertools

import numpy as np
import pytest

from kvjax.layout import (
    LAYOUTS,
    ArrayLayout,
    Layout,
    Scales,
    Shard,
    TensorPlace,
    address,
    canonical_layout,
    layout_of,
    view,
)
from kvjax.layout import make_layout as make
from kvjax.spec import GroupSpec, TensorSpec
from tests.layout.foreign import Geometry, foreign_arrays

EQUAL = (
    Geometry(),
    Geometry(layers=1, num_pages=3, page_size=2, heads=4, key_dim=8, value_dim=8, dtype="bfloat16"),
    Geometry(layers=3, num_pages=2, page_size=1, heads=3, key_dim=32, value_dim=32, dtype="int8"),
    Geometry(layers=1, num_pages=2, page_size=2, heads=3, key_dim=64, value_dim=64, dtype="bfloat16"),
)
UNEQUAL = Geometry(key_dim=24, value_dim=8)
TAKE_UNEQUAL = ("kvjax", "jax_paged_attention", "token_major", "vllm_packed")
CASES = [(name, geometry) for name in LAYOUTS for geometry in EQUAL] + [(name, UNEQUAL) for name in TAKE_UNEQUAL]


def coordinates(layout: Layout, name: str):
    """(layer, head, token, lane) of every element of a tensor."""
    _, tensor = layout.tensor(name)
    tokens = layout.num_pages * layout.page_size
    return itertools.product(range(layout.layers), range(tensor.heads), range(tokens), range(tensor.width))


def check_addresses(layout, geometry, arrays):
    """Every element of the geometry's tensors stands in `arrays` where `address` says."""
    assert {array.name: layout.shape(array) for array in layout.arrays} == {n: a.shape for n, a in arrays.items()}
    bits = {n: a.view(f"u{a.itemsize}").reshape(-1) for n, a in arrays.items()}
    seen = set()
    for kv, tensor in geometry.tensors().items():
        values = tensor.view(f"u{tensor.itemsize}")
        for layer, head, token, lane in coordinates(layout, kv):
            place = address(layout, layer, kv, head, token, lane)
            page, offset = divmod(token, geometry.page_size)
            assert bits[place.array][place.element] == values[layer, page, offset, head, lane], place
            assert place.byte == place.element * tensor.itemsize and place.shard == ()
            seen.add((place.array, place.element))
    assert len(seen) == sum(tensor.size for tensor in geometry.tensors().values())


@pytest.mark.parametrize(("name", "geometry"), CASES, ids=str)
def test_every_element_is_found_where_the_formula_says(name, geometry):
    layout = make(name, geometry.group, num_pages=geometry.num_pages, page_size=geometry.page_size)
    check_addresses(layout, geometry, foreign_arrays(name, **geometry.tensors()))


@pytest.mark.parametrize(("name", "geometry"), CASES, ids=str)
def test_a_view_is_the_tensor_in_plain_order(name, geometry):
    layout = make(name, geometry.group, num_pages=geometry.num_pages, page_size=geometry.page_size)
    arrays = foreign_arrays(name, **geometry.tensors())
    for kv, plain in enumerate(geometry.tensors().values()):
        for layer in range(geometry.layers):
            expected = plain[layer].reshape(-1, geometry.heads, plain.shape[-1])
            assert view(layout, arrays, layer, kv).tobytes() == expected.tobytes()


def test_a_view_takes_the_whole_array_of_a_layout_with_shards():
    geometry = Geometry(heads=4)
    layout = make("flashinfer_hnd", geometry.group, num_pages=5, page_size=4, shards=(Shard("head", "tensor", 2),))
    arrays = foreign_arrays("flashinfer_hnd", **geometry.tensors())
    assert view(layout, arrays, 1, "v").tobytes() == geometry.tensors()["v"][1].tobytes()
    with pytest.raises(ValueError, match="has shape"):
        view(layout, {"kv": arrays["kv"][:, :2]}, 1, "v")
    with pytest.raises(ValueError, match="layer=2 is outside"):
        view(layout, arrays, 2, "v")


def test_coordinates_are_integers_of_any_kind_and_do_not_overflow():
    geometry = Geometry(heads=8, key_dim=128, value_dim=128)
    layout = make("vllm_nhd", geometry.group, num_pages=2**20, page_size=16)
    last = (1, 1, 7, 2**24 - 1, 127)
    assert address(layout, *map(np.int32, last)) == address(layout, *last)
    assert address(layout, *last).element == 2 * 2 * 2**20 * 16 * 8 * 128 - 1
    for axis, wrong in itertools.product(range(5), (1.0, True, None)):
        with pytest.raises(ValueError, match="must be an integer"):
            address(layout, *last[:axis], wrong, *last[axis + 1 :])


def test_a_wrong_order_is_noticed():
    """The check above, on an array of the same shape whose heads and tokens are exchanged."""
    geometry = Geometry(heads=4)
    layout = make("flashinfer_nhd", geometry.group, num_pages=5, page_size=4)
    with pytest.raises(AssertionError):
        check_addresses(layout, geometry, foreign_arrays("flashinfer_hnd", **geometry.tensors()))


def test_padded_lanes_of_the_running_cache():
    """A pool padded to 128 lanes, as on TPU."""
    group = Geometry(key_dim=24, value_dim=8).group
    page = canonical_layout(group, 4, lane_multiple=128)
    layout = layout_of(page, layers=2, num_pages=5)
    assert layout == make("kvjax", group, num_pages=5, page_size=4, lane_multiple=128)
    assert layout.shape(layout.arrays[0]) == (10, 3, 4, 128)
    for kv, first in (("k", 0), ("v", 24)):
        for layer, head, token, lane in coordinates(layout, kv):
            flat = ((layer * 5 + token // 4) * 3 + head) * 4 * 128 + token % 4 * 128 + first + lane
            assert address(layout, layer, kv, head, token, lane).element == flat
    assert layout.nbytes == 2 * 5 * page.bytes_per_page


SCALED = GroupSpec(
    "quantised",
    (0, 1),
    (
        TensorSpec("k", 2, 16, "int8"),
        TensorSpec("v", 2, 16, "int8"),
        TensorSpec("k_scale", 2, 16, "float32"),
        TensorSpec("v_scale", 2, 8, "float32"),
    ),
)
SCALES = {"k_scale": Scales("k", "token", 4), "v_scale": Scales("v", "lane", 2)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_scales_stand_once_for_their_group(name):
    """Key scales: one for four tokens of a lane; value scales: one for two lanes of a token."""
    layout = make(name, SCALED, num_pages=3, page_size=8, scales=SCALES)
    array, _ = layout.tensor("k_scale")
    assert layout.shape(array) == (6, 2, 2, 16)
    ids = np.arange(6 * 2 * 2 * 16).reshape(6, 2, 2, 16)
    for layer, head, token, lane in coordinates(layout, "k_scale"):
        expected = ids[layer * 3 + token // 8, head, token % 8 // 4, lane]
        assert address(layout, layer, "k_scale", head, token, lane).element == expected
    values, _ = layout.tensor("v_scale")
    assert layout.shape(values) == (6, 2, 8, 8)


SHARDED = {
    "kvjax": (None, "tensor", None, None),
    "vllm_nhd": (None, None, None, None, "tensor", None),
    "vllm_hnd": (None, None, None, "tensor", None, None),
    "flashinfer_nhd": (None, None, None, None, "tensor", None),
    "flashinfer_hnd": (None, None, None, "tensor", None, None),
    "tpu_inference": (None, None, None, "tensor", None, None),
}


@pytest.mark.parametrize("name", SHARDED)
def test_heads_over_two_devices(name):
    """Each device's share, cut from the whole array by numpy, holds its heads at the local addresses."""
    geometry = Geometry(heads=4)
    layout = make(name, geometry.group, num_pages=5, page_size=4, shards=(Shard("head", "tensor", 2),))
    array = layout.arrays[0]
    assert layout.partition(array) == SHARDED[name]
    tensors = geometry.tensors()
    whole = foreign_arrays(name, **tensors)[array.name]
    shares = np.split(whole, 2, axis=SHARDED[name].index("tensor"))
    for kv, tensor in tensors.items():
        for layer, head, token, lane in coordinates(layout, kv):
            place = address(layout, layer, kv, head, token, lane)
            assert place.shard == (head // 2,)
            got = shares[place.shard[0]].reshape(-1)[place.element]
            assert got == tensor[layer, token // 4, token % 4, head, lane]


K = TensorPlace("k", 3, 16)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("layer page head token", "must name lane once"),
        ("layer page head token lane lane", "must name lane once"),
        ("layer page head token lane/4", "must name lane once, or cut it"),
        ("layer page head token lane/4 lane%8", "must name lane once, or cut it"),
        ("layer page/2 page%2 head token lane", "must name page once"),
        ("layer page head token line", "'line'"),
        ("layer page head token lane/0 lane%0", "lane/0"),
        ("layer (token page) head lane", "layer comes first"),
    ],
)
def test_an_order_that_does_not_place_every_element_once_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        Layout("mine", 2, 5, 4, (ArrayLayout("k", order, (K,), "float32", 16),))


def test_what_a_layout_cannot_hold_is_refused():
    array = ArrayLayout("k", "layer page head token lane", (K,), "float32", 16)
    for arguments, message in (
        (("x", 0, 5, 4, (array,)), "layers=0"),
        (("x", 2, 5, 4, (array, array)), "distinct names"),
        (("x", 2, 5, 4, (ArrayLayout("k", array.order, (K,), "float32", 15),)), "outside"),
        (("x", 2, 5, 4, (array,), (Shard("head", "tensor", 2),)), "3 heads"),
        (("x", 2, 5, 4, (ArrayLayout("k", "(layer page) head token lane", (K,), "float32", 16),),
          (Shard("page", "context", 5),)), "cannot be split"),
        (("x", 2, 5, 4, (array,), (), "middle"), "byte_order"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Layout(*arguments)
    overlap = (K, TensorPlace("v", 3, 4, lane=12))
    with pytest.raises(ValueError, match=r"share lanes 12…15"):
        Layout("x", 2, 5, 4, (ArrayLayout("kv", array.order, overlap, "float32", 16),))
    with pytest.raises(ValueError, match="known: kvjax, vllm_nhd"):
        make("vllm", Geometry().group, num_pages=5, page_size=4)
    for name in sorted(set(LAYOUTS) - set(TAKE_UNEQUAL)):
        with pytest.raises(ValueError, match="width 24 and values of width 8"):
            make(name, UNEQUAL.group, num_pages=5, page_size=4)
    with pytest.raises(ValueError, match="vectors of 4"):
        make("vllm_packed", Geometry(key_dim=6, value_dim=6).group, num_pages=5, page_size=4)
    layout = make("kvjax", Geometry().group, num_pages=5, page_size=4)
    for place, message in (
        ((2, "k", 0, 0, 0), "layer=2"),
        ((0, "k", 3, 0, 0), "head=3"),
        ((0, "k", 0, 20, 0), "token=20"),
        ((0, 1, 0, 0, -1), "lane=-1"),
        ((0, "scale", 0, 0, 0), "'scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            address(layout, *place)
