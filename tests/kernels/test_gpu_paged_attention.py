"""The GPU kernels keep the contract under the GPU interpreter, and broken twins of them do not."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.gpu import attend_items
from pallas_kernels.gpu import paged_attention as kernel
from pallas_kernels.gpu.block_rule import Blocks, choose_blocks
from pallas_kernels.gpu.masks import Mask
from pallas_kernels.gpu.page_stream import PageStream
from pallas_kernels.gpu.ring import Ring
from pallas_kernels.gpu.schedule import BLOCK, make_schedule
from pallas_kernels.hardware import H100, H200, KIB
from tests.kernels import contract, gpu_interpreter
from tests.kernels.races import RaceFoundError

CASES = {case.name: case for case in contract.CASES}
BFLOAT16, FLOAT32 = (
    replace(contract.ragged("2:1", 64, 16, dtype), tiles=((5, 1, 83), (0, 1, 17), (6, 0, 0), (5, 1, 70)))
    for dtype in ("bfloat16", "float32")
)
BOTH = pytest.mark.parametrize("case", [BFLOAT16, FLOAT32], ids=str)


def run(case, *, workers=3, detect_races=True):
    """Holds the kernel to the contract, under the interpreter."""
    attend, static = kernel.paged_attention, ("attention",)
    gpu_interpreter.run(attend, contract.run, case, static=static, workers=workers, races_too=detect_races)


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_keeps_the_contract(case):
    # Detecting races takes longer than the rest, and they do not depend on shapes and masks: see below.
    run(case, detect_races=False)


@BOTH
def test_has_no_race_where_items_are_cut(case):
    run(case, workers=4)


@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", "token"), ("float32", "tensor")])
def test_has_no_race_while_it_dequantises(dtype, scales):
    case = {"bfloat16": BFLOAT16, "float32": FLOAT32}[dtype]
    run(replace(case, pool_dtype="int8", scales=scales, window=30, tiles=case.tiles[:2]))


@pytest.mark.parametrize("heads", [65])
def test_any_number_of_query_heads_may_share_a_kv_head(heads):
    run(replace(BFLOAT16, q_heads=heads, kv_heads=1), detect_races=False)


@BOTH
def test_a_missing_v_mask_is_noticed(monkeypatch, case):
    monkeypatch.setattr(Mask, "clear_unseen", lambda self, block, values: None)
    monkeypatch.setattr(Mask, "of_values", lambda self, block, values: values)
    with pytest.raises(AssertionError, match="NaN"):
        run(case, detect_races=False)


@BOTH
def test_a_missing_logits_mask_is_noticed(monkeypatch, case):
    monkeypatch.setattr(Mask, "of_logits", lambda self, block, x, unseen: x)
    monkeypatch.setattr(Mask, "of_places", lambda self, block, x, unseen: x)
    with pytest.raises(AssertionError, match="NaN"):
        run(case, detect_races=False)


@BOTH
def test_a_missing_wait_for_copies_is_noticed(monkeypatch, case):
    monkeypatch.setattr(Ring, "take", lambda self, turn: jax.lax.rem(turn, self.buffers))
    with pytest.raises(RaceFoundError):
        run(case)


@BOTH
def test_a_missing_wait_for_room_is_noticed(monkeypatch, case):
    monkeypatch.setattr(Ring, "await_room", lambda self, turn: jax.lax.rem(turn, self.buffers))
    monkeypatch.setattr(attend_items, "choose_blocks", lambda *shape: Blocks(2, 2))
    # A barrier that completes twice before anyone has seen it once is an error of its own.
    with pytest.raises((RaceFoundError, AssertionError, jax.errors.JaxRuntimeError)):
        run(replace(case, lengths=(700,), tiles=((0, 1, 700),)), workers=1)


def test_buffers_that_go_from_consumer_to_consumer_are_noticed(monkeypatch):
    monkeypatch.setattr(attend_items, "choose_blocks", lambda *shape: Blocks(2, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"all phases|no threads observed phase"):
        run(replace(BFLOAT16, lengths=(700,), tiles=((0, 1, 700),)), workers=1, detect_races=False)


@BOTH
def test_a_missing_fence_is_noticed(monkeypatch, case):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(RaceFoundError):
        run(case)


def test_pieces_that_are_not_weighed_are_noticed(monkeypatch):
    merge = attend_items.merge
    monkeypatch.setattr(attend_items, "merge", lambda pieces, logs, *rest: merge(pieces, jnp.minimum(logs, 0), *rest))
    with pytest.raises(AssertionError, match="relative error"):
        run(BFLOAT16, detect_races=False)


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
    """Raises AssertionError unless exactly the mapped pages were copied, in whole blocks, keys and values once each."""
    problem = contract.make_problem(case)
    readers = case.kv_heads if case.dtype == "bfloat16" else case.q_heads
    seen = [(row, context) for row, _, context in case.tiles if context]
    mapped = {
        int(problem.page_offset + page)
        for row, context in seen
        for page in problem.pages[row, : -(-context // case.page_size)]
    }
    assert set(pages) == mapped
    assert len(pages) == sum(2 * readers * -(-context // BLOCK) * (BLOCK // case.page_size) for _, context in seen)


@BOTH
def test_exactly_the_pages_of_each_context_are_read(copied_pages, case):
    run(case, detect_races=False)
    check_copied(copied_pages, case)


def test_pages_before_a_window_are_not_read(copied_pages):
    case = replace(CASES["long-2:1x64-page16-bfloat16-window40-kept4"], tiles=((0, 1, 70 * 16 - 3),))
    run(case, detect_races=False)
    # Blocks of four pages: the kept ones, and the two that the window touches; never a page id of 2**30.
    assert len(pages := set(copied_pages)) <= 12 and max(pages) < len(contract.make_problem(case).pool)


def test_a_page_past_the_context_is_noticed(copied_pages, monkeypatch):
    places = PageStream.places

    def one_page_more(self, block):
        return places(replace(self, context=self.context + BFLOAT16.page_size), block)

    monkeypatch.setattr(PageStream, "places", one_page_more)
    run(BFLOAT16, detect_races=False)  # and yet the answer is right: what the copy brings is masked
    with pytest.raises(AssertionError, match=str(contract.UNUSED_ENTRY)[:4]):
        check_copied(copied_pages, BFLOAT16)


@pytest.mark.parametrize(("dtype", "products"), [(jnp.bfloat16, 2), (jnp.float16, 2), (jnp.float32, 0)])
def test_float32_keeps_off_the_matrix_instructions(dtype, products):
    struct, i32 = jax.ShapeDtypeStruct, jnp.int32
    arrays = struct((4, 1, 8, 64), dtype), struct((64, 2, 16, 128), dtype), struct((4, 128), i32)
    tiles = Tiles(*(struct((4,), i32) for _ in range(3)))
    attend = partial(kernel.paged_attention, attention=Attention(64, 0.125), facts=H200)
    program = str(jax.make_jaxpr(attend)(*arrays, tiles, struct((), i32)))
    assert program.count("wgmma_ref") == products
    assert "dot_general" not in program and "= mma[" not in program


@pytest.mark.parametrize(
    ("contexts", "items", "workers", "window", "kept"),
    [
        ([2**18] + [1024] * 63, 8, 132, None, 0),
        ([0, 0, 5, 0, 64, 65, 0], 3, 4, None, 0),
        ([0, 0], 2, 5, None, 0),
        ([10_000, 1, 300], 2, 7, 500, 70),
        ([1], 1, 132, None, 0),
    ],
)
def test_shares_are_equal_and_cover_everything_once(contexts, items, workers, window, kept):
    """Against a plain list of (item, block): one long row among short ones leaves nobody idle."""
    context = jnp.array(contexts, jnp.int32)
    tiles = Tiles(jnp.arange(len(contexts)), (context > 0).astype(jnp.int32), context)
    schedule = jax.tree.map(np.asarray, make_schedule(tiles, Attention(64, 1.0, window, kept), items, workers))
    every = []
    for tile, end in enumerate(contexts):
        positions = range(end) if window is None else [*range(min(kept, end)), *range(max(0, end - window), end)]
        blocks = sorted({position // BLOCK for position in positions})
        every += [(tile * items + item, block) for item in range(items) for block in blocks]
    walked = []
    for start, stop, first_item, last_item in schedule.shares:
        assert stop - start in (len(every) // workers, len(every) // workers + 1)
        for item in range(first_item, last_item):
            tile, within = divmod(item, items)
            begin = schedule.before[tile] + within * schedule.units[tile]
            for unit in range(max(start - begin, 0), min(stop - begin, schedule.units[tile])):
                walked.append((item, unit if unit < schedule.kept[tile] else unit + schedule.skipped[tile]))
    assert walked == every


@pytest.mark.parametrize(
    ("dims", "dtype", "pool_dtype", "scale_rings", "blocks"),
    [
        ((128, 128), "bfloat16", "bfloat16", 0, Blocks(2, 4)),
        ((64, 64), "bfloat16", "bfloat16", 0, Blocks(2, 8)),
        ((256, 256), "bfloat16", "bfloat16", 0, Blocks(1, 2)),
        ((256, 256), "float32", "float32", 0, Blocks(1, 1)),
        ((128, 128), "bfloat16", "int8", 2, Blocks(2, 4)),
        ((256, 112), "bfloat16", "int8", 0, Blocks(1, 4)),
        ((192, 128), "bfloat16", "int8", 0, Blocks(2, 2)),
        ((192, 128), "bfloat16", "int8", 2, Blocks(1, 6)),
    ],
)
def test_rings_are_as_deep_as_memory_allows(dims, dtype, pool_dtype, scale_rings, blocks):
    assert choose_blocks(*dims, dtype, pool_dtype, scale_rings, H100) == blocks


def test_a_ring_that_does_not_fit_is_refused():
    small = replace(H100, shared_memory_bytes_per_block=100 * KIB)
    with pytest.raises(ValueError, match=r"key_dim=256.*h100: take smaller heads"):
        choose_blocks(256, 256, "float32", "float32", 0, small)


GOOD = (
    jax.ShapeDtypeStruct((4, 1, 8, 64), jnp.float32),
    jax.ShapeDtypeStruct((10, 2, 16, 128), jnp.float32),
    jax.ShapeDtypeStruct((4, 8), jnp.int32),
    Tiles(*(jax.ShapeDtypeStruct((4,), jnp.int32) for _ in range(3))),
    jax.ShapeDtypeStruct((), jnp.int32),
)


def trace(facts=H200, pages=GOOD[2], **options):
    attend = partial(kernel.paged_attention, attention=Attention(64, 0.125), facts=facts, **options)
    jax.eval_shape(attend, *GOOD[:2], pages, *GOOD[3:])


def test_good_arguments_are_taken():
    trace()


def test_another_gpu_than_a_hopper_is_refused():
    with pytest.raises(NotImplementedError, match=r"compute_capability=\(10, 0\).*Hopper.*XLA path"):
        trace(replace(H200, compute_capability=(10, 0)))


def test_too_many_blocks_and_no_workers_are_refused():
    with pytest.raises(ValueError, match=r"2³¹ or more; split the tiles over several calls"):
        trace(pages=jax.ShapeDtypeStruct((4, 2**28), jnp.int32))
    with pytest.raises(ValueError, match="workers=0; choose at least 1"):
        trace(workers=0)
