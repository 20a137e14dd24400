"""The TPU kernel keeps the contract under the TPU interpreter, and broken twins of it do not."""

import base64
import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import tpu as tpu_dialect
from jaxlib.mlir import ir

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.hardware import TPU_V5P, TPU_V6E
from pallas_kernels.tpu import paged_attention as kernel
from pallas_kernels.tpu.page_stream import PageStream
from pallas_kernels.tpu.running_softmax import RunningSoftmax
from pallas_kernels.tpu.visibility import Visibility
from tests.kernels import contract, tpu_interpreter
from tests.kernels.races import RaceFoundError
from tests.kernels.tpu_interpreter import INTERPRET

CASE = contract.CASES[0]


def run(case, **options):
    problem = contract.make_problem(case, lane_multiple=128)
    tpu_interpreter.run(kernel.paged_attention, problem, **options)


@pytest.mark.parametrize("case", [case for case in contract.CASES if case.stored_dtype != "float16"], ids=str)
def test_keeps_the_contract(case):
    run(case)


def test_a_pool_of_float16_is_not_implemented():
    with pytest.raises(NotImplementedError, match=r"float16.*on v6e; keep keys and values in bfloat16"):
        run(CASES["ragged-8:1x128-page16-float16"])


TWO_CORES = replace(INTERPRET, num_cores_or_threads=2)
CASES = {case.name: case for case in contract.CASES}


@pytest.mark.parametrize(
    "name",
    [
        "ragged-9:3x64-page16-bfloat16",
        "long-2:1x64-page16-bfloat16-window40-kept4",
        "chunks4-4:2x64-page16-bfloat16-all",
        "nothing",
    ],
)
def test_two_cores_share_the_blocks(name):
    run(CASES[name], facts=TPU_V5P, interpret=TWO_CORES)


LONG_ROW = replace(CASES["long-2:1x64-page16-bfloat16"], lengths=(700, 5), tiles=((1, 1, 5), (0, 1, 700), (1, 1, 3)))


@pytest.mark.parametrize("change", [{}, {"window": 500, "kept": 130}, {"sinks": True}], ids=str)
def test_two_cores_share_one_long_row(change):
    run(replace(LONG_ROW, **change), facts=TPU_V5P, interpret=TWO_CORES)


@pytest.mark.parametrize("pages_per_block", [16, 128])
def test_keeps_the_contract_whatever_the_block(pages_per_block):
    run(CASE, pages_per_block=pages_per_block)


def test_more_tiles_than_a_grid_step_looks_ahead():
    rows = tuple(1 + 7 * row % 23 for row in range(300))
    many = replace(
        CASES["ragged-1:1x64-page16-bfloat16"], lengths=rows, tiles=tuple((r, 1, n) for r, n in enumerate(rows))
    )
    run(many, interpret=replace(INTERPRET, detect_races=False))


def test_what_one_row_sees_does_not_reach_another():
    """Buffers that a short row does not fill still hold the numbers of a row before it."""
    problem = contract.make_problem(CASES["ragged-1:1x64-page16-bfloat16"], lane_multiple=128)
    longest = 5
    pool = problem.pool.copy()
    pool[problem.pages[longest, :6] + problem.page_offset] = jnp.inf
    options = {"attention": problem.attention, "facts": TPU_V6E, "pages_per_block": 8}
    attention = jax.jit(partial(kernel.paged_attention, **options, interpret=replace(INTERPRET, detect_races=False)))
    out = attention(problem.q, pool, *problem.arrays[2:])
    for tile, (row, _, _) in enumerate(problem.case.tiles):
        assert jnp.isnan(out[tile]).any() == (row == longest), f"{tile=}, {row=}"


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_missing_wait_is_noticed(monkeypatch, mode):
    monkeypatch.setattr(PageStream, "_wait", lambda self, tile, block, buffer: None)
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


@pytest.mark.parametrize(
    ("case", "mask"),
    [(CASE, "of_slots"), (CASE, "of_lines"), (replace(LONG_ROW, tokens=2), "has_query")],
    ids=["of_slots", "of_lines", "has_query"],
)
def test_a_missing_mask_is_noticed(monkeypatch, case, mask):
    run(case)
    monkeypatch.setattr(Visibility, mask, lambda self, *at: jnp.ones(mask_shape(self, *at), bool))
    with pytest.raises(AssertionError):
        run(case)


def mask_shape(visibility, first, second=None):
    if second is None:
        return first
    return second if isinstance(second, tuple) else (visibility.lines, second)


def test_a_sink_counted_by_both_cores_is_noticed(monkeypatch):
    open_softmax = RunningSoftmax.open
    monkeypatch.setattr(RunningSoftmax, "open", lambda self, sinks, counted: open_softmax(self, sinks, True))
    with pytest.raises(AssertionError, match="relative error"):
        run(replace(LONG_ROW, sinks=True, dtype="float32"), facts=TPU_V5P, interpret=TWO_CORES)


def mosaic_text(dtype):
    """The kernel as it is handed to the TPU compiler."""
    struct, i32 = jax.ShapeDtypeStruct, jnp.int32
    tiles = Tiles(*[struct((4,), i32)] * 3)
    shapes = (
        struct((4, 1, 8, 64), dtype),
        struct((64, 2, 16, 128), dtype),
        struct((4, 128), i32),
        tiles,
        struct((), i32),
    )
    attention = partial(kernel.paged_attention, attention=Attention(64, 0.125), facts=TPU_V6E)
    lowered = jax.jit(attention).trace(*shapes).lower(lowering_platforms=("tpu",))
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


def test_a_new_scale_does_not_recompile():
    problem = contract.make_problem(CASES["ragged-4:2x64-page16-bfloat16-int8-tensor"], lane_multiple=128)
    traces = []

    @jax.jit
    def attend(scales):
        traces.append(scales)
        options = {
            "attention": problem.attention,
            "facts": TPU_V6E,
            "interpret": replace(INTERPRET, detect_races=False),
        }
        return kernel.paged_attention(*problem.arrays, scales=scales, **options)

    once = attend(problem.scales)
    twice = attend(replace(problem.scales, value=2 * problem.scales.value))
    assert len(traces) == 1
    assert jnp.array_equal(2 * once, twice)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pages_per_block": 3}, "pages_per_block=3 of page_size=16; choose a power of two from 8 to 128"),
        ({"pages_per_block": 4}, "a block has at least 128 tokens"),
        ({"facts": replace(TPU_V6E, vmem_bytes=2**18)}, r"bytes of vector memory; v6e has 229376.*smaller pages"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_repair(options, message):
    with pytest.raises(ValueError, match=message):
        run(CASES["ragged-32:8x128-page16-bfloat16"], **options)
