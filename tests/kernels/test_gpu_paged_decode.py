"""The GPU kernels keep the contract under the GPU interpreter, and broken twins of them do not."""

import contextlib
import io
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import float32_decode, tensor_core_decode
from pallas_kernels.gpu import paged_decode as kernel
from pallas_kernels.gpu.page_stream import BLOCK, PageStream
from pallas_kernels.hardware import H100, H200, KIB
from tests.kernels import contract

CASES = {case.name: case for case in contract.CASES}
BFLOAT16, FLOAT32 = contract.ragged("2:1", 64, 16, "bfloat16"), contract.ragged("2:1", 64, 16, "float32")
BOTH = pytest.mark.parametrize("case", [BFLOAT16, FLOAT32], ids=str)
PRODUCTS = {"bfloat16": tensor_core_decode, "float32": float32_decode}


class RaceFoundError(Exception):
    """The interpreter saw a race."""


def run(case, *, splits=1, detect_races=True):
    """Holds the kernel to the contract. Some versions of JAX raise when they see a race, others only print."""
    interpret = plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")
    decode = partial(kernel.paged_decode, facts=H200, splits=splits, interpret=interpret)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            contract.run(jax.jit(decode, static_argnames=("value_dim", "scale")), case)
    except Exception as error:
        if "RACE DETECTED" in printed.getvalue() + str(error):
            raise RaceFoundError from error
        raise
    finally:
        reset_gpu_interpret_mode_state()
    if "RACE DETECTED" in printed.getvalue():
        raise RaceFoundError(printed.getvalue())


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_keeps_the_contract(case):
    # Detecting races takes longer than the rest, and they do not depend on how many heads there are.
    run(case, detect_races=case.q_heads < 32)


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("long-2:1x64-page16-bfloat16", 5),  # rings wrap around
        ("long-3:1x128-page16-float32", 7),
        ("ragged-1:1x64-page16-bfloat16", None),
        ("nothing", 3),
    ],
)
def test_keeps_the_contract_however_contexts_are_split(name, splits):
    run(CASES[name], splits=splits)


@pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(64, 128, "bfloat16"), (128, 64, "float32")])
def test_keys_and_values_may_differ_in_width(key_dim, value_dim, dtype):
    run(replace(contract.ragged("4:2", key_dim, 16, dtype), value_dim=value_dim))


@pytest.mark.parametrize("heads", [11, 64, 65])
def test_any_number_of_query_heads_may_share_a_kv_head(heads):
    run(replace(contract.ragged("1:1", 64, 16, "bfloat16"), q_heads=heads, queries=((5, 83), (0, 17), (6, 0))))


@BOTH
def test_a_missing_v_mask_is_noticed(monkeypatch, case):
    monkeypatch.setattr(PRODUCTS[case.dtype], "_clear_past", lambda block, context, values: values)
    with pytest.raises(AssertionError, match="NaN"):
        run(case)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@BOTH
def test_a_missing_logits_mask_is_noticed(monkeypatch, case):
    monkeypatch.setattr(PRODUCTS[case.dtype], "_mask", lambda block, context, logits: logits)
    with pytest.raises(AssertionError, match="NaN"):
        run(case)


@BOTH
def test_a_missing_wait_is_noticed(monkeypatch, case):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises(RaceFoundError):
        run(case)


@BOTH
def test_a_missing_fence_is_noticed(monkeypatch, case):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(RaceFoundError):
        run(case)


@BOTH
def test_a_buffer_sent_for_too_early_is_noticed(monkeypatch, case):
    send = PageStream._send

    def send_again(self, block, buffer, page_ids):
        send(self, block, buffer, page_ids)
        send(self, block, (buffer + 1) % self.buffers, page_ids)

    monkeypatch.setattr(PageStream, "_send", send_again)
    with pytest.raises(RaceFoundError):
        run(case)


@pytest.fixture
def copied_pages(monkeypatch):
    """The page of each copy out of the pool, as they are made."""
    pages = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def record(*, src_transforms, **arguments):
        (indexer,) = src_transforms
        page, *_, tokens, _lanes = indexer.indices
        if getattr(tokens, "size", None) == BFLOAT16.page_size:  # copies of q have other shapes
            pages.append(int(page))
        return copy(src_transforms=src_transforms, **arguments)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", record)
    return pages


def check_copied(pages, case):
    """Raises AssertionError unless exactly the mapped pages were copied, in whole blocks, once for each reader."""
    problem = contract.make_problem(case)
    readers = case.kv_heads if case.dtype == "bfloat16" else case.q_heads
    seen = [(row, context) for row, context in case.queries if context]
    mapped = {
        int(problem.page_offset + page)
        for row, context in seen
        for page in problem.pages[row, : -(-context // case.page_size)]
    }
    assert set(pages) == mapped
    assert len(pages) == sum(readers * -(-context // BLOCK) * (BLOCK // case.page_size) for _, context in seen)


@BOTH
def test_exactly_the_pages_of_each_context_are_read(copied_pages, case):
    run(case, splits=2)
    check_copied(copied_pages, case)


def test_a_page_past_the_context_is_noticed(copied_pages, monkeypatch):
    page_ids = PageStream._page_ids

    def one_page_more(self, block):
        return page_ids(replace(self, context=self.context + BFLOAT16.page_size), block)

    monkeypatch.setattr(PageStream, "_page_ids", one_page_more)
    run(BFLOAT16)  # and yet the answer is right: what the copy brings is masked
    with pytest.raises(AssertionError, match=str(contract.UNUSED_ENTRY)[:4]):
        check_copied(copied_pages, BFLOAT16)


@pytest.mark.parametrize(("dtype", "products"), [(jnp.bfloat16, 2), (jnp.float32, 0)])
def test_only_bfloat16_goes_through_matrix_instructions(dtype, products):
    struct, i32 = jax.ShapeDtypeStruct, jnp.int32
    arrays = struct((4, 8, 64), dtype), struct((64, 2, 16, 128), dtype), struct((4, 128), i32)
    scalars = struct((4,), i32), struct((4,), i32), struct((), i32)
    decode = partial(kernel.paged_decode, value_dim=64, scale=0.125, facts=H200)
    program = str(jax.make_jaxpr(decode)(*arrays, *scalars))
    assert program.count("wgmma_ref") == products
    assert "dot_general" not in program and "= mma[" not in program


@pytest.mark.parametrize(
    ("buffer_bytes", "other_bytes", "buffers"),
    [(32 * KIB, 25 * KIB, 2), (16 * KIB, 16 * KIB, 4), (64 * KIB, 1 * KIB, 3), (110 * KIB, 1 * KIB, 2)],
)
def test_the_ring_fits_twice_a_multiprocessor_or_else_once(buffer_bytes, other_bytes, buffers):
    assert kernel.ring_buffers(buffer_bytes, other_bytes, H100) == buffers


def test_a_ring_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"buffer_bytes=122880.*h100: take smaller heads"):
        kernel.ring_buffers(120 * KIB, 0, H100)


@pytest.mark.parametrize(
    ("queries", "heads", "dtype", "tokens", "splits"),
    [
        (1, (32, 8), "bfloat16", 2**20, 33),
        (1, (32, 8), "float32", 2**20, 8),
        (16, (130, 1), "bfloat16", 2**20, 5),
        (256, (32, 8), "bfloat16", 2**20, 1),
        (1, (1, 1), "bfloat16", 512, 8),
    ],
)
def test_default_splits_fill_the_gpu_but_no_more(queries, heads, dtype, tokens, splits):
    q = jax.ShapeDtypeStruct((queries, heads[0], 64), dtype)
    pool = jax.ShapeDtypeStruct((64, heads[1], 16, 128), dtype)
    pages = jax.ShapeDtypeStruct((1, tokens // 16), jnp.int32)
    assert kernel.default_splits(q, pool, pages, H200) == splits


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
        ({"value_dim": 128}, "lanes=128 of the pool.*need 192"),
        ({"pool": ((10, 2, 24, 128), jnp.float32)}, "page_size=24.*16, 32, 64 or 128"),
        ({"splits": 0}, "splits=0; choose at least 1"),
        (
            {name: ((65536, *GOOD[name][0][1:]), GOOD[name][1]) for name in ("q", "row", "context")},
            "queries=65536.*over several calls",
        ),
    ],
)
def test_bad_arguments_are_refused_with_the_repair(change, message):
    arguments = {"value_dim": 64, "facts": H200, "splits": None, **GOOD, **change}
    arrays = {name: jax.ShapeDtypeStruct(*arguments.pop(name)) for name in GOOD}
    with pytest.raises(ValueError, match=message):
        kernel.check_arguments(**arrays, **arguments)


def test_another_gpu_than_a_hopper_is_refused():
    arrays = [jax.ShapeDtypeStruct(*spec) for spec in GOOD.values()]
    kernel.check_arguments(*arrays, value_dim=64, facts=H200)
    with pytest.raises(NotImplementedError, match=r"compute_capability=\(10, 0\).*Hopper.*XLA path"):
        kernel.check_arguments(*arrays, value_dim=64, facts=replace(H200, compute_capability=(10, 0)))
