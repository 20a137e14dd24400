"""The TPU kernel keeps the contract under the TPU interpreter, and broken twins of it do not."""

import base64
import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import tpu as tpu_dialect
from jax.experimental.pallas import tpu as pltpu
from jaxlib.mlir import ir

from pallas_kernels.hardware import TPU_V5P, TPU_V6E
from pallas_kernels.tpu import paged_decode as kernel
from pallas_kernels.tpu.page_stream import PageStream
from tests.kernels import contract

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
CASE = contract.CASES[0]


class RaceFoundError(Exception):
    """The interpreter saw a race."""


def run(case, *, facts=TPU_V6E, interpret=INTERPRET, pages_per_block=2):
    """Holds the kernel to the contract. Some versions of JAX raise when they see a race, others only print."""
    options = {"facts": facts, "interpret": interpret, "pages_per_block": pages_per_block}
    decode = jax.jit(partial(kernel.paged_decode, **options), static_argnames=("value_dim", "scale"))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            contract.run(decode, case, lane_multiple=128)
    except Exception as error:
        if "RACE DETECTED" in str(error):
            raise RaceFoundError from error
        raise
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    if "RACE DETECTED" in printed.getvalue():
        raise RaceFoundError(printed.getvalue())


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_keeps_the_contract(case):
    # Small blocks, so that a context takes several and a table slice ends inside one of the long rows.
    run(case, pages_per_block=4 if case.name.startswith("long") else 2)


@pytest.mark.parametrize(
    ("case", "pages_per_block"),
    [(contract.CASES[0], 1), (contract.CASES[0], 128), (contract.CASES[5], None)],
    ids=str,
)
def test_keeps_the_contract_whatever_the_block(case, pages_per_block):
    run(case, pages_per_block=pages_per_block)


@pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(64, 128, "bfloat16"), (128, 64, "float32")])
def test_keys_and_values_may_differ_in_width(key_dim, value_dim, dtype):
    run(replace(contract.ragged("4:2", key_dim, 16, dtype), value_dim=value_dim))


def test_two_cores_share_the_queries():
    two_cores = replace(INTERPRET, num_cores_or_threads=2)
    assert len(CASE.queries) % TPU_V5P.tensor_cores == 0
    run(CASE, facts=TPU_V5P, interpret=two_cores)


def test_one_core_may_have_nothing_to_do():
    idle_half = replace(CASE, lengths=(40, 20), queries=((0, 40), (1, 20), (1, 7), (2, 0), (2, 0), (2, 0)))
    run(idle_half, facts=TPU_V5P)


def test_a_missing_v_mask_is_noticed(monkeypatch):
    monkeypatch.setattr(kernel, "_clear_from", lambda visible, buffer: None)
    with pytest.raises(AssertionError, match="NaN"):
        run(CASE)


def test_a_missing_logits_mask_is_noticed(monkeypatch):
    attend = kernel._attend_block

    def unmasked(q, keys, values, visible, scale, state):
        return attend(q, keys, values, keys.shape[1], scale, state)

    monkeypatch.setattr(kernel, "_attend_block", unmasked)
    with pytest.raises(AssertionError, match="relative error"):
        run(CASE)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_missing_wait_is_noticed(monkeypatch, mode):
    monkeypatch.setattr(PageStream, "_wait", lambda self, buffer, pages: None)
    # Copies that happen at once give the right answer without a wait: only the race is left to see.
    with pytest.raises(RaceFoundError if mode == "eager" else AssertionError):
        run(CASE, interpret=replace(INTERPRET, dma_execution_mode=mode))


def test_an_early_reuse_of_a_buffer_is_noticed(monkeypatch):
    start_next = PageStream.start_next

    def start_two(self):
        start_next(self)
        start_next(self)

    monkeypatch.setattr(PageStream, "start_next", start_two)
    with pytest.raises((RaceFoundError, AssertionError)):
        run(CASE, interpret=replace(INTERPRET, dma_execution_mode="eager"))


def mosaic_text(dtype):
    """The kernel as it is handed to the TPU compiler."""
    struct, i32 = jax.ShapeDtypeStruct, jnp.int32
    arrays = struct((4, 8, 64), dtype), struct((64, 2, 16, 128), dtype), struct((4, 128), i32)
    scalars = struct((4,), i32), struct((4,), i32), struct((), i32)
    decode = partial(kernel.paged_decode, value_dim=64, scale=0.125, facts=TPU_V6E)
    lowered = jax.jit(decode).trace(*arrays, *scalars).lower(lowering_platforms=("tpu",))
    (config,) = re.findall(r'backend_config = "([^"]*custom_call_config[^"]*)"', lowered.as_text())
    config = re.sub(r"\\([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), config)
    body = base64.b64decode(json.loads(config)["custom_call_config"]["body"])
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        tpu_dialect.register_dialect(context)
        return str(ir.Module.parse(body))


@pytest.mark.parametrize(("dtype", "exact"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_float32_products_are_exact_and_bfloat16_ones_are_single_pass(dtype, exact):
    products = [line for line in mosaic_text(dtype).splitlines() if "tpu.matmul" in line]
    assert len(products) >= 2
    assert all(("contract_precision<fp32>" in line) == exact for line in products)
    assert all(line.endswith("xf32>") for line in products)


GOOD = {
    "q": ((4, 8, 64), jnp.float32),
    "pool": ((10, 2, 16, 128), jnp.float32),
    "pages": ((4, 8), jnp.int32),
    "row": ((4,), jnp.int32),
    "context": ((4,), jnp.int32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ((4, 512), jnp.float32)}, r"q.shape=\(4, 512\).*pass q \[queries, q_heads, key_dim\]"),
        ({"pool": ((0, 2, 16, 128), jnp.float32)}, "no dimension may be 0"),
        ({"q": ((4, 8, 64), jnp.bfloat16)}, "q.dtype=.*bfloat16.*cast q"),
        ({"q": ((4, 8, 64), jnp.float16), "pool": ((10, 2, 16, 128), jnp.float16)}, "both must be bfloat16, or both"),
        ({"pages": ((4, 8), jnp.uint32)}, "pages.dtype=uint32; cast it to int32"),
        ({"context": ((5,), jnp.int32)}, r"context.shape=\(5,\).*queries=4"),
        ({"q": ((4, 9, 64), jnp.float32)}, "q_heads=9 is not a multiple of kv_heads=2"),
        ({"q": ((4, 8, 80), jnp.float32)}, "key_dim=80.*64 or 128"),
        ({"value_dim": 96}, "value_dim=96.*64 or 128"),
        ({"value_dim": 128}, "lanes=128 of the pool.*need 256"),
        ({"pool": ((10, 2, 24, 128), jnp.float32)}, "page_size=24.*16, 32, 64 or 128"),
        ({"pages_per_block": 3}, "pages_per_block=3.*power of two"),
        ({"facts": replace(TPU_V6E, vmem_bytes=2**15)}, "ring_bytes=32768.*vmem_bytes=32768.*smaller pages"),
        ({"facts": replace(TPU_V6E, smem_bytes=32)}, "queries=4.*split the queries"),
    ],
)
def test_bad_arguments_are_refused_with_the_repair(change, message):
    arguments = {"value_dim": 64, "facts": TPU_V6E, "pages_per_block": None, **GOOD, **change}
    arrays = {name: jax.ShapeDtypeStruct(*arguments.pop(name)) for name in GOOD}
    with pytest.raises(ValueError, match=message):
        kernel.check_arguments(**arrays, **arguments)


def test_the_good_arguments_are_not_refused():
    kernel.check_arguments(*(jax.ShapeDtypeStruct(*spec) for spec in GOOD.values()), value_dim=64, facts=TPU_V6E)
