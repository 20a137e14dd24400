"""The TPU kernels that move bytes keep the contract under the TPU interpreter, and broken twins of them do not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import pages
from pallas_kernels.hardware import TPU_V4, TPU_V5P, TPU_V6E
from pallas_kernels.tpu import append as append_module
from pallas_kernels.tpu import move_pages as move_module
from pallas_kernels.tpu import rewrite
from tests.kernels import bytes_contract as contract
from tests.kernels import races

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
TWO_CORES = replace(INTERPRET, num_cores_or_threads=2)
ON_WAIT = replace(INTERPRET, dma_execution_mode="on_wait")
CASES = [case for case in contract.CASES if case.dtype != "float16"]
PAGES = pytest.mark.parametrize(("shape", "dtype"), contract.PAGE_SHAPES, ids=str)
CHECKS = {
    pages.copy_pages: contract.check_copy,
    pages.gather_pages: contract.check_gather,
    pages.write_pages: contract.check_write,
    pages.scrub_pages: contract.check_scrub,
}


def run_append(case, *, facts=TPU_V6E, interpret=INTERPRET):
    with races.raised(pltpu.reset_tpu_interpret_mode_state):
        contract.check_append(append_module.append, case, lane_multiple=128, facts=facts, interpret=interpret)


def run_moves(operation, shape, dtype, *, facts=TPU_V6E, interpret=INTERPRET):
    with races.raised(pltpu.reset_tpu_interpret_mode_state):
        CHECKS[operation](operation, shape, dtype, facts=facts, interpret=interpret)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_keeps_the_contract(case):
    run_append(case)


@pytest.mark.parametrize("buffers", [2, 4])
def test_append_keeps_the_contract_when_the_ring_wraps_around(monkeypatch, buffers):
    monkeypatch.setattr(rewrite, "ring_buffers", lambda *_: buffers)
    run_append(contract.Case(1, (64, 64), 16, "int8", "token"))


@pytest.mark.parametrize("rows", [contract.PLAIN.rows, ((0, 16), (0, 1)), ((8, 5), (8, 0), (0, 0))], ids=str)
def test_two_cores_share_the_tokens_of_an_append(rows):
    run_append(replace(contract.PLAIN, rows=rows), facts=TPU_V5P, interpret=TWO_CORES)


@pytest.mark.parametrize("operation", CHECKS)
@PAGES
def test_page_ops_keep_the_contract(operation, shape, dtype):
    run_moves(operation, shape, dtype)


def test_two_cores_share_the_layers_of_page_copies():
    run_moves(pages.copy_pages, (1, 16, 128), "bfloat16", facts=TPU_V4, interpret=TWO_CORES)


def test_page_copies_keep_the_contract_when_few_may_be_in_flight(monkeypatch):
    monkeypatch.setattr(move_module, "IN_FLIGHT", 2)
    run_moves(pages.copy_pages, (1, 16, 128), "bfloat16")


def test_two_programs_on_one_strip_are_noticed(monkeypatch):
    """Every token a run of its own: each reads the strip before the others have written it."""
    monkeypatch.setattr(rewrite._Runs, "_end_of_run", lambda self, first: first + 1)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_append(contract.PLAIN)


def test_a_strip_shared_between_cores_is_noticed(monkeypatch):
    """Shares that end anywhere: the tokens of one strip go to both cores."""
    share = lambda self, core: jnp.int32(core * (self.unit_of.shape[0] - 1) // self.cores)  # noqa: E731
    monkeypatch.setattr(rewrite._Runs, "share", share)
    case = replace(contract.PLAIN, rows=((0, 7), (0, 0)))  # nine tokens, the boundary after the fourth
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_append(case, facts=TPU_V5P, interpret=TWO_CORES)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_missing_wait_for_what_is_read_is_noticed(monkeypatch, mode):
    monkeypatch.setattr(rewrite._Runs, "_wait_arrived", lambda self, buffer: None)
    # Copies that happen at once give the right answer without a wait: only the race is left to see.
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_append(contract.PLAIN, interpret=replace(INTERPRET, dma_execution_mode=mode))


def test_a_missing_wait_for_what_is_written_is_noticed(monkeypatch):
    monkeypatch.setattr(rewrite, "ring_buffers", lambda *_: 2)
    monkeypatch.setattr(rewrite._Runs, "wait_written", lambda self, buffer: None)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_append(contract.PLAIN, interpret=ON_WAIT)


def test_a_row_of_scales_that_was_not_read_is_noticed(monkeypatch):
    """A page's scales may be wholly new and yet not fill their row."""
    monkeypatch.setattr(rewrite._Runs, "_is_read", lambda self, buffer: self.runs[1, buffer] < self.unit.tokens)
    with pytest.raises(AssertionError, match=r"scales 0: .* elements differ"):
        run_append(contract.Case(1, (64, 64), 16, "int8", "token", rows=((0, 16),)))


def test_lost_neighbours_of_a_token_are_noticed(monkeypatch):
    """A merge that takes the whole strip for the token's."""
    strip_of = append_module.strip_of

    def careless(pool):
        def merge(strip, token, slot):
            strip[...] = jnp.zeros(strip.shape, strip.dtype)

        return replace(strip_of(pool), merge=merge)

    monkeypatch.setattr(append_module, "strip_of", careless)
    with pytest.raises(AssertionError, match=r"elements differ"):
        run_append(contract.PLAIN)


def test_a_missing_wait_for_page_copies_is_noticed(monkeypatch):
    monkeypatch.setattr(move_module, "_wait_for_one", lambda target, done: None)
    with pytest.raises((races.RaceFoundError, AssertionError)):
        run_moves(pages.copy_pages, (1, 16, 128), "bfloat16", interpret=ON_WAIT)


def test_images_that_are_not_scrubbed_are_noticed(monkeypatch):
    monkeypatch.setattr(pages, "scrub_pages", lambda images, *_, **__: images)
    with pytest.raises(AssertionError, match=r"images: .* elements differ"):
        run_moves(pages.gather_pages, (1, 16, 128), "bfloat16")


def test_float16_is_refused_with_the_repair():
    pool, numbers = jax.ShapeDtypeStruct((4, 2, 16, 128), jnp.float16), jax.ShapeDtypeStruct((3,), jnp.int32)
    new = (jax.ShapeDtypeStruct((3, 2, 64), jnp.float16),) * 2
    with pytest.raises(NotImplementedError, match="no float16: make the pool bfloat16"):
        jax.eval_shape(partial(append_module.append, facts=TPU_V6E), pool, numbers, numbers, new)
    with pytest.raises(NotImplementedError, match="no float16"):
        jax.eval_shape(partial(pages.copy_pages, num_pages=2, facts=TPU_V6E), pool, numbers, numbers)


def unit(buffer_bytes, tokens=8):
    return rewrite.Unit(tokens, True, (buffer_bytes // 128, 128), lambda *_: None, lambda *_: None)


@pytest.mark.parametrize(
    ("strip_bytes", "facts", "buffers"),
    [
        (2**10, TPU_V6E, 32),  # small strips: the most there are
        (2**20, TPU_V6E, 4),  # two being read and two written deliver 1.64 MB in a microsecond
        (2**20, TPU_V4, 2),
    ],
)
def test_the_ring_holds_what_memory_delivers_in_the_time_of_a_copy(strip_bytes, facts, buffers):
    new = jax.ShapeDtypeStruct((4, 1, 128), jnp.uint32)
    assert rewrite.ring_buffers(unit(strip_bytes), jnp.dtype("int8"), new, facts) == buffers


def test_a_ring_that_does_not_fit_is_refused():
    new = jax.ShapeDtypeStruct((4, 1, 128), jnp.uint32)
    with pytest.raises(ValueError, match=r"buffer_bytes=.*v4.*smaller pages, or shard the heads"):
        rewrite.ring_buffers(unit(4 * 2**20), jnp.dtype("int8"), new, TPU_V4)


def test_more_tokens_than_scalar_memory_holds_are_refused():
    pool, numbers = jax.ShapeDtypeStruct((4, 2, 16, 128), jnp.float32), jax.ShapeDtypeStruct((2**17,), jnp.int32)
    new = (jax.ShapeDtypeStruct((2**17, 2, 64), jnp.float32),) * 2
    with pytest.raises(ValueError, match=r"131072 packed tokens.*several calls"):
        jax.eval_shape(partial(append_module.append, facts=TPU_V6E), pool, numbers, numbers, new)
