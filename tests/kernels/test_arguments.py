"""What every kernel refuses, with the repair."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.arguments import Attention, Runs, Scales, Tiles, check_arguments

GOOD = {
    "q": ((4, 1, 8, 64), jnp.float32),
    "pool": ((10, 2, 16, 128), jnp.float32),
    "pages": ((4, 8), jnp.int32),
    "row": ((4,), jnp.int32),
    "queries": ((4,), jnp.int32),
    "context": ((4,), jnp.int32),
}
INT8 = ((10, 2, 16, 128), jnp.int8)
SCALE = ((), jnp.float32)
RUNS, PER_ROW = ((4, 3), jnp.int32), ((4,), jnp.int32)  # lists of runs, and what has one entry a row


def check(*, lane_multiple=1, value_dim=64, sinks=None, scales=None, runs=None, **change):
    arrays = {name: jax.ShapeDtypeStruct(*spec) for name, spec in {**GOOD, **change}.items()}
    check_arguments(
        arrays["q"],
        arrays["pool"],
        Runs(*(jax.ShapeDtypeStruct(*spec) for spec in runs)) if runs else arrays["pages"],
        Tiles(*(arrays[name] for name in ("row", "queries", "context"))),
        attention=Attention(value_dim, 0.125),
        sinks=sinks and jax.ShapeDtypeStruct(*sinks),
        scales=scales and Scales(*(jax.ShapeDtypeStruct(*scale) for scale in scales)),
        lane_multiple=lane_multiple,
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lane_multiple": 128},
        {"sinks": ((8,), jnp.float32)},
        {"pool": INT8, "scales": (SCALE, ((2,), jnp.float32))},
        {"pool": INT8, "scales": (SCALE, ((10, 128), jnp.float32)), "lane_multiple": 128},
        {"pool": ((10, 2, 16, 176), jnp.float32), "value_dim": 112},
        {"runs": (RUNS, RUNS, PER_ROW)},
    ],
)
def test_good_arguments_are_taken(change):
    check(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ((4, 8, 64), jnp.float32)}, r"q.shape=\(4, 8, 64\).*pass q \[tiles, tokens, q_heads, key_dim\]"),
        ({"pool": ((0, 2, 16, 128), jnp.float32)}, "no dimension may be 0"),
        ({"q": ((4, 1, 8, 64), jnp.bfloat16)}, "q.dtype=.*bfloat16.*cast q"),
        ({"q": ((4, 1, 8, 64), jnp.int32)}, "q.dtype=.*int32.*bfloat16, float16, float32"),
        ({"pages": ((4, 8), jnp.uint32)}, "pages.dtype=uint32; cast it to int32"),
        ({"pages": ((4,), jnp.int32)}, r"pages.shape=\(4,\); pass \[rows, width\]"),
        ({"pages": ((4, 0), jnp.int32)}, "neither 0"),
        ({"runs": (((4, 3), jnp.int16), RUNS, PER_ROW)}, "runs.starts.dtype=int16; cast it to int32"),
        ({"runs": (RUNS, ((12,), jnp.int32), PER_ROW)}, r"runs.ends.shape=\(12,\); pass \[rows, max_runs\]"),
        ({"runs": (RUNS, RUNS, ((4,), jnp.uint32))}, "runs.num_runs.dtype=uint32; cast it to int32"),
        ({"runs": (RUNS, ((4, 2), jnp.int32), PER_ROW)}, r"runs.ends.shape=\(4, 2\).*one shape \[rows, max_runs\]"),
        ({"runs": (RUNS, RUNS, ((3,), jnp.int32))}, r"runs.num_runs.shape=\(3,\).*one entry a row"),
        ({"context": ((5,), jnp.int32)}, r"context.shape=\(5,\).*each of the 4 tiles"),
        ({"q": ((4, 1, 9, 64), jnp.float32)}, "q_heads=9 is not a multiple of kv_heads=2"),
        ({"q": ((4, 1, 8, 72), jnp.float32)}, "key_dim=72.*64, 80"),
        ({"value_dim": 100}, "value_dim=100.*64, 80"),
        ({"value_dim": 128}, "lanes=128 of the pool.*need 192"),
        ({"value_dim": 80, "lane_multiple": 128}, "lanes=128 of the pool.*need 256"),
        ({"pool": ((10, 2, 24, 128), jnp.float32)}, "page_size=24.*16, 32, 64 or 128"),
        ({"sinks": ((2,), jnp.float32)}, r"sinks.shape=\(2,\).*q_heads=8"),
        ({"pool": INT8}, "without scales; pass Scales"),
        ({"scales": (SCALE, SCALE)}, "scales for.*float32.*pass None"),
        ({"pool": INT8, "scales": (SCALE, ((3,), jnp.float32))}, r"scales.value.*scale.shape=\(3,\).*\(2,\)"),
        ({"pool": INT8, "scales": (((), jnp.bfloat16), SCALE)}, "scales.key.*bfloat16.*float32"),
        ({"pool": INT8, "scales": (SCALE, ((10, 31), jnp.float32))}, "scales.value.*a page has 32 scales"),
        ({"pool": INT8, "scales": (SCALE, ((10, 32), jnp.float32)), "lane_multiple": 128}, "a multiple of 128"),
    ],
)
def test_bad_arguments_are_refused_with_the_repair(change, message):
    with pytest.raises(ValueError, match=message):
        check(**change)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"window": 0}, "window=0; make it at least 1"),
        ({"kept": 4}, "kept=4 with window=None"),
        ({"window": 8, "kept": -1}, "kept=-1"),
        ({"soft_cap": 0.0}, "soft_cap=0.0; make it above 0"),
        ({"soft_cap": float("nan")}, "soft_cap=nan"),
    ],
)
def test_attention_that_means_nothing_is_refused(field, message):
    with pytest.raises(ValueError, match=message):
        Attention(64, 0.125, **field)
