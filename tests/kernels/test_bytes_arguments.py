"""The kernels that move bytes refuse bad arguments, and say the value and the repair."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bytes_arguments import check_append_arguments, check_images, check_page_list

GOOD = {
    "pool": ((10, 2, 16, 128), jnp.int8),
    "page": ((5,), jnp.int32),
    "offset": ((5,), jnp.int32),
    "key": ((5, 2, 64), jnp.bfloat16),
    "value": ((5, 2, 64), jnp.bfloat16),
    "key_scale": ((2,), jnp.float32),
    "value_scale": ((), jnp.float32),
}


def check(**changes):
    """Checks the arguments of an append, some of them changed; None leaves the scales out."""
    specs = {**GOOD, **changes}
    arrays = {name: spec and jax.ShapeDtypeStruct(*spec) for name, spec in specs.items()}
    scales = (arrays["key_scale"], arrays["value_scale"]) if arrays["key_scale"] else None
    tensors = (arrays["key"], arrays["value"])
    check_append_arguments(arrays["pool"], arrays["page"], arrays["offset"], tensors, scales=scales, lane_multiple=128)


def test_good_arguments_pass():
    check()
    check(key_scale=((10, 128), jnp.float32), value_scale=((10, 256), jnp.float32))
    check(pool=((10, 2, 16, 128), jnp.bfloat16), key_scale=None)
    # Quantised before: stored as they are.
    check(key=((5, 2, 64), jnp.int8), value=((5, 2, 64), jnp.int8), key_scale=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": ((10, 2, 16), jnp.int8)}, r"pool.shape=\(10, 2, 16\).*pass pool \[total_pages"),
        ({"pool": ((10, 2, 0, 128), jnp.int8)}, "no dimension may be 0"),
        ({"pool": ((10, 2, 16, 128), jnp.int32)}, "pool.dtype=.*int32.*use one of bfloat16"),
        ({"pool": ((10, 2, 24, 128), jnp.int8)}, "page_size=24; make pages of 16, 32, 64 or 128"),
        ({"page": ((5,), jnp.uint32)}, "page: .*uint32.*pass int32"),
        ({"offset": ((4,), jnp.int32)}, r"offset: array.shape=\(4,\).*one a packed token \(5,\)"),
        ({"key": ((5, 3, 64), jnp.bfloat16)}, r"tensor.shape=\(5, 3, 64\).*kv_heads=2"),
        ({"key": ((5, 2, 64), jnp.int32)}, "tensor.dtype=.*int32.*bfloat16, float16, float32"),
        ({"key": ((5, 2, 80), jnp.bfloat16)}, "lanes=128 of the pool; tensors of 144 lanes side by side need 256"),
        ({"key_scale": None}, "needs scales for each of 2 tensors; pass ones"),
        ({"pool": ((10, 2, 16, 128), jnp.float32)}, "scales for pool.dtype=.*float32.*pass None"),
        ({"key_scale": ((3,), jnp.float32)}, r"scale.shape=\(3,\).*\(2,\) or \(10, scale_lanes\)"),
        ({"key_scale": ((10, 128), jnp.float32)}, "one tensor has scales a token and another has not"),
        (dict.fromkeys(("key_scale", "value_scale"), ((10, 64), jnp.float32)), "a page has 32: .*multiple of 128"),
    ],
)
def test_bad_arguments_of_an_append_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_bad_lists_of_pages_are_refused():
    pool, pages = jax.ShapeDtypeStruct((10, 2, 16, 128), jnp.int8), jax.ShapeDtypeStruct((3,), jnp.int32)
    check_page_list(pool, pages, 5)
    with pytest.raises(ValueError, match=r"num_pages=3; pass \[layers · num_pages"):
        check_page_list(pool, pages, 3)
    with pytest.raises(ValueError, match=r"pages.dtype=.*uint32.*list of int32"):
        check_page_list(pool, jax.ShapeDtypeStruct((3,), jnp.uint32), 5)
    with pytest.raises(ValueError, match=r"images of these pages are \(2, 3, 2, 16, 128\), int8"):
        check_images(pool, pages, jax.ShapeDtypeStruct((2, 3, 2, 16, 256), jnp.int8), 5)
