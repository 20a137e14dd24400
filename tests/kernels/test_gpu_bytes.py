"""The GPU kernels that move bytes keep the contract under the GPU interpreter, and broken twins of them do not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import pages
from pallas_kernels.gpu import append as append_module
from pallas_kernels.gpu import move_pages as move_module
from pallas_kernels.hardware import H200
from tests.kernels import bytes_contract as contract
from tests.kernels import races

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
SMALL = replace(H200, multiprocessors=2)  # few thread blocks: each has several chunks, and the rings wrap around
PAGES = pytest.mark.parametrize(("shape", "dtype"), contract.PAGE_SHAPES, ids=str)
CHECKS = {
    pages.copy_pages: contract.check_copy,
    pages.gather_pages: contract.check_gather,
    pages.write_pages: contract.check_write,
    pages.scrub_pages: contract.check_scrub,
}


def run_append(case):
    with races.raised(reset_gpu_interpret_mode_state):
        contract.check_append(append_module.append, case, facts=H200, interpret=INTERPRET)


def run_moves(operation, shape, dtype):
    with races.raised(reset_gpu_interpret_mode_state):
        CHECKS[operation](operation, shape, dtype, facts=SMALL, interpret=INTERPRET)


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_append_keeps_the_contract(case):
    run_append(case)


@pytest.mark.parametrize("operation", CHECKS)
@PAGES
def test_page_ops_keep_the_contract(operation, shape, dtype):
    run_moves(operation, shape, dtype)


def test_page_copies_keep_the_contract_when_a_page_is_several_chunks(monkeypatch):
    monkeypatch.setattr(move_module, "CHUNK_BYTES", 512)
    run_moves(pages.copy_pages, (1, 16, 128), "bfloat16")


def test_a_missing_wait_for_new_tokens_is_noticed(monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_append(contract.PLAIN)


def test_a_missing_wait_for_a_page_is_noticed(monkeypatch):
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_moves(pages.copy_pages, (1, 16, 128), "bfloat16")


def test_a_buffer_sent_for_before_it_was_stored_is_noticed(monkeypatch):
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda number, wait_read_only=False: None)
    monkeypatch.setattr(move_module, "CHUNK_BYTES", 512)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_moves(pages.copy_pages, (1, 16, 128), "bfloat16")


def test_a_worker_that_stops_early_is_noticed(monkeypatch):
    monkeypatch.setattr(move_module, "THREAD_BLOCKS_PER_MULTIPROCESSOR", 1)
    monkeypatch.setattr(move_module.pl, "cdiv", lambda a, b: a // b)
    with pytest.raises(AssertionError, match=r"pool: .* elements differ"):
        run_moves(pages.copy_pages, (1, 16, 128), "bfloat16")


def test_images_that_are_not_scrubbed_are_noticed(monkeypatch):
    monkeypatch.setattr(pages, "scrub_pages", lambda images, *_, **__: images)
    with pytest.raises(AssertionError, match=r"images: .* elements differ"):
        run_moves(pages.gather_pages, (1, 16, 128), "bfloat16")


@pytest.mark.parametrize(
    ("page", "dtype", "chunks"),
    [
        ((8, 16, 256), "bfloat16", (4, 32, 256)),
        ((2, 16, 160), "int8", (1, 20, 256)),
        ((3, 128, 128), "float32", (12, 16, 256)),
        ((1, 16, 1), "float32", (1, 1, 16)),
        ((7, 64, 400), "bfloat16", (25, 28, 256)),
    ],
)
def test_a_page_is_cut_into_equal_chunks_that_can_be_copied(page, dtype, chunks):
    target = jax.ShapeDtypeStruct((10, *page), dtype)
    number, rows, lanes = move_module.chunks_of(target)
    assert (number, rows, lanes) == chunks
    assert number * rows * lanes * 10 == target.size
    assert rows * lanes * target.dtype.itemsize <= move_module.CHUNK_BYTES


def test_pages_of_odd_bytes_are_refused():
    with pytest.raises(ValueError, match=r"pages \(3, 5\) of int8.*multiples of 16 bytes: pad them"):
        move_module.chunks_of(jax.ShapeDtypeStruct((10, 3, 5), jnp.int8))


def test_lanes_that_cannot_be_copied_are_refused():
    pool, numbers = jax.ShapeDtypeStruct((4, 2, 16, 130), jnp.float16), jax.ShapeDtypeStruct((3,), jnp.int32)
    new = (jax.ShapeDtypeStruct((3, 2, 65), jnp.float16),) * 2
    with pytest.raises(ValueError, match=r"lanes=130 of float16.*pad the lanes"):
        jax.eval_shape(partial(append_module.append, facts=H200), pool, numbers, numbers, new)


def test_another_gpu_than_a_hopper_is_refused():
    blackwell = replace(H200, compute_capability=(10, 0))
    pool, numbers = jax.ShapeDtypeStruct((4, 2, 16, 128), jnp.float16), jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"compute_capability=\(10, 0\).*Hopper.*XLA path"):
        jax.eval_shape(partial(pages.copy_pages, num_pages=2, facts=blackwell), pool, numbers, numbers)
