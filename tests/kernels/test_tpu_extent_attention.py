"""The TPU kernel over runs keeps the contract under the TPU interpreter, copies runs at once, and its twins do not."""

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from pallas_kernels.hardware import TPU_V5P
from pallas_kernels.tpu.block_stream import BlockStream
from pallas_kernels.tpu.extent_attention import extent_attention
from pallas_kernels.tpu.extent_stream import ExtentStream
from pallas_kernels.tpu.paged_attention import paged_attention
from pallas_kernels.tpu.table_slices import SLICE
from tests.kernels import contract, tpu_interpreter
from tests.kernels.extents import WHOLE, in_runs

CASES = {case.name: case for case in contract.CASES}
LONG = CASES["long-2:1x64-page16-bfloat16"]
# Of 8 pages a block: what this row sees begins in the middle of one, ends in another, and jumps over slices of runs.
SLIDING = contract.long("2:1", 64, 16, "bfloat16", pages=300).change("window200-kept40", window=200, kept=40)
# Two slices of runs, of which some tiles that share the row need but the first.
MANY_RUNS = replace(LONG, lengths=(2230, 5), tiles=((0, 1, 300), (0, 1, 2230), (0, 1, 1), (1, 1, 5)))
ONE_LONG_ROW = replace(LONG, lengths=(700, 5), tiles=((1, 1, 5), (0, 1, 700), (1, 1, 3)))
# The scales of a page take two columns of 128 lanes.
WIDE_SCALES = contract.ragged("4:4", 64, 64, "bfloat16").change("int8-token", pool_dtype="int8", scales="token")
TWO_CORES = {"facts": TPU_V5P, "interpret": replace(tpu_interpreter.INTERPRET, num_cores_or_threads=2)}


def run(case: contract.Case, lengths: tuple[int, ...], **options) -> None:
    problem = in_runs(contract.make_problem(case, lane_multiple=128), lengths)
    tpu_interpreter.run(extent_attention, problem, **options)


@pytest.mark.parametrize(
    ("case", "lengths", "options"),
    [
        (LONG, (1, 2, 3), {}),
        (LONG, (21, 3, 1, 40), {"pages_per_block": 32}),
        (MANY_RUNS, (1,), {}),
        (SLIDING, (1,), {}),
        (CASES["ragged-1:1x128-page128-float32"], (2,), {}),
        (CASES["chunks4-4:2x64-page16-bfloat16-all"], (WHOLE,), {}),
        (CASES["chunks6-4:2x64-page16-bfloat16-all-int8-token"], (3,), {}),
        (WIDE_SCALES, (3, 1), {}),
        (CASES["nothing"], (1,), {}),
        (replace(SLIDING, sinks=True), (1, 2), TWO_CORES),
        (replace(ONE_LONG_ROW, window=500, kept=130), (3,), TWO_CORES),
    ],
    ids=lambda value: value.name if isinstance(value, contract.Case) else None,
)
def test_keeps_the_contract(case, lengths, options):
    run(case, lengths, **options)


def walks_past_the_end(self, tile, page, reach=ExtentStream._reach):
    _, shift = reach(self, tile, page)
    return contract.UNUSED_ENTRY, shift


def sends_for_every_slice(self, tile, slice_):
    (num_runs,) = self.lengths
    return slice_ + 1, num_runs[self.tiles.row[tile]] > (slice_ + 1) * SLICE


@pytest.mark.parametrize(
    ("method", "broken", "case", "lengths"),
    [
        ("_reach", walks_past_the_end, CASES["ragged-1:1x64-page16-bfloat16"], (2,)),
        ("_following_slice", sends_for_every_slice, MANY_RUNS, (1,)),
    ],
)
def test_a_broken_walk_is_noticed(monkeypatch, method, broken, case, lengths):
    monkeypatch.setattr(ExtentStream, method, broken)
    with pytest.raises(AssertionError):
        run(case, lengths)


FULL_BLOCKS = replace(LONG, lengths=(512, 128), tiles=((0, 1, 512), (1, 1, 128)))
WITH_SCALES = FULL_BLOCKS.change("int8-token", pool_dtype="int8", scales="token")
BLOCKS, PAGES_PER_BLOCK = 5, 8


def copies(monkeypatch: pytest.MonkeyPatch, kernel: Callable, problem: contract.Problem) -> int:
    """How many copies from HBM to vector memory are started while a problem is computed."""
    counted: list[int] = []
    start_copy = BlockStream._start_copy

    def start_and_count(self, source, place, buffer):
        jax.debug.callback(lambda: counted.append(1))
        start_copy(self, source, place, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(BlockStream, "_start_copy", start_and_count)
        tpu_interpreter.run(kernel, problem, interpret=replace(tpu_interpreter.INTERPRET, detect_races=False))
    jax.effects_barrier()
    return sum(counted)


@pytest.mark.parametrize(("case", "sources"), [(FULL_BLOCKS, 1), (WITH_SCALES, 3)], ids=["pool", "pool-and-scales"])
def test_a_block_in_one_run_is_one_copy_of_each_source(monkeypatch, case, sources):
    problem = contract.make_problem(case, lane_multiple=128)
    assert copies(monkeypatch, extent_attention, in_runs(problem, (WHOLE,))) == sources * BLOCKS


def test_a_block_over_runs_or_page_by_page_is_more_copies(monkeypatch):
    problem = contract.make_problem(FULL_BLOCKS, lane_multiple=128)
    assert copies(monkeypatch, extent_attention, in_runs(problem, (5, 3))) == 2 * BLOCKS
    assert copies(monkeypatch, paged_attention, problem) == PAGES_PER_BLOCK * BLOCKS
