"""The GPU kernel over spans keeps the contract of the paged ones, and reads each block by one copy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention, Scales, Tiles
from pallas_kernels.gpu.masks import Mask
from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.gpu.span_attention import span_attention
from pallas_kernels.gpu.span_stream import Spans, SpanStream
from pallas_kernels.hardware import H200
from tests.kernels import contract, gpu_interpreter, spans
from tests.kernels.contract import chunks, ragged

CASES = (
    ragged("9:3", 64, 16, "bfloat16"),
    ragged("32:8", 128, 16, "bfloat16"),
    ragged("8:1", 128, 16, "float16"),
    ragged("6:2", 128, 32, "float32"),
    ragged("4:2", 80, 16, "bfloat16"),
    ragged("2:1", 112, 16, "float16"),
    ragged("3:1", 192, 16, "bfloat16").change("value128", value_dim=128),
    ragged("2:1", 256, 16, "bfloat16"),
    contract.nothing_to_read(),
    chunks("2:1", 64, 16, "bfloat16", 40),
    chunks("2:1", 64, 16, "float32", 6).change("window17-kept18", window=17, kept=18),
    chunks("4:2", 64, 16, "bfloat16", 4).change("all", window=21, kept=3, soft_cap=5.0, sinks=True),
    contract.long("2:1", 64, 16, "bfloat16", pages=70).change("window40-kept4", window=40, kept=4),
    ragged("6:3", 64, 16, "bfloat16").change("e4m3-head", pool_dtype="float8_e4m3fn", scales="head"),
    ragged("4:2", 128, 16, "float32").change("e5m2-tensor", pool_dtype="float8_e5m2"),
    ragged("4:2", 64, 16, "bfloat16").change("int8-tensor", pool_dtype="int8"),
)
BFLOAT16, FLOAT32 = (
    replace(ragged("2:1", 64, 16, dtype), tiles=((5, 1, 83), (0, 1, 17), (6, 0, 0), (5, 1, 70)))
    for dtype in ("bfloat16", "float32")
)
BOTH = pytest.mark.parametrize("case", [BFLOAT16, FLOAT32], ids=str)


def run(case, *, workers=3, detect_races=True):
    static = ("kv_heads", "attention")
    gpu_interpreter.run(span_attention, spans.run, case, static=static, workers=workers, races_too=detect_races)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_the_contract(case):
    run(case, detect_races=False)


@BOTH
def test_has_no_race_where_items_are_cut(case):
    run(case, workers=4)


def test_a_missing_mask_is_noticed(monkeypatch):
    monkeypatch.setattr(Mask, "of_logits", lambda self, block, x, unseen: x)
    with pytest.raises(AssertionError, match="NaN"):
        run(BFLOAT16, detect_races=False)


def test_the_wrong_place_in_a_record_is_noticed(monkeypatch):
    send = SpanStream._send
    monkeypatch.setattr(SpanStream, "_send", lambda self, *at: send(self, *at[:-1], at[-1] + 2 * 64))
    with pytest.raises(AssertionError, match="NaN"):
        run(replace(BFLOAT16, q_heads=1), detect_races=False)


@pytest.fixture
def copies(monkeypatch):
    """(row, first token) of each copy out of the spans, as they are made."""
    made = []
    copy = gpu_callbacks.copy_gmem_to_smem

    def record(*, src_transforms, **arguments):
        (indexer,) = src_transforms
        row, tokens, *_ = indexer.indices
        if getattr(tokens, "size", None) in (BLOCK, BLOCK // 2):  # copies of q have other shapes
            made.append((int(row), int(tokens.start)))
        return copy(src_transforms=src_transforms, **arguments)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", record)
    return made


def check_copies(copies, case):
    """Raises AssertionError unless every block of every context is one copy of keys and one of values a KV head."""
    blocks = [(row, first) for row, _, context in case.tiles for first in range(0, context, BLOCK)]
    readers = case.kv_heads if case.dtype == "bfloat16" else case.q_heads
    assert sorted(copies) == sorted(2 * readers * blocks)


@BOTH
def test_each_block_is_one_copy(copies, case):
    run(case, detect_races=False)
    check_copies(copies, case)


def test_a_block_in_two_copies_is_noticed(copies, monkeypatch):
    def send_halves(self, ring, turn, block, first_lane):
        buffer, lanes = ring.await_room(turn), pl.ds(first_lane, ring.slots.shape[2])
        for half in range(2):
            source = self.source.memory.at[self.row, pl.ds(block * BLOCK + half * BLOCK // 2, BLOCK // 2), lanes]
            target = ring.slots.at[buffer, pl.ds(half * BLOCK // 2, BLOCK // 2)]
            plgpu.copy_gmem_to_smem(source, target, ring.arrived.at[buffer])

    monkeypatch.setattr(SpanStream, "_send", send_halves)
    monkeypatch.setattr(Spans, "copies", 2)
    run(BFLOAT16, detect_races=False)  # and yet the answer is right
    with pytest.raises(AssertionError):
        check_copies(copies, BFLOAT16)


def trace(memory=(4, 128, 512), *, dtype=jnp.bfloat16, kv_heads=2, **options):
    struct, per_tile = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((3,), jnp.int32)
    options = {"attention": Attention(64, 0.125), "facts": H200, **options}
    attend = partial(span_attention, kv_heads=kv_heads, **options)
    arrays = struct((3, 1, 8, 64), jnp.bfloat16), struct(memory, dtype), Tiles(per_tile, per_tile, per_tile)
    return jax.eval_shape(attend, *arrays, struct((), jnp.int32))


def test_arguments_are_taken_or_refused_by_name():
    assert trace().shape == (3, 1, 8, 64)
    with pytest.raises(ValueError, match=r"span_tokens a multiple of 64"):
        trace((4, 100, 512))
    with pytest.raises(ValueError, match=r"multiple of 128 bytes"):
        trace((4, 128, 520))
    with pytest.raises(ValueError, match=r"kv_heads=5 of 128 lanes do not fit"):
        trace(kv_heads=5)
    with pytest.raises(ValueError, match=r"2³¹ or more; split the tiles"):
        trace((4, 2**40, 512))
    with pytest.raises(NotImplementedError, match=r"no scales per token"):
        trace(dtype=jnp.int8, scales=Scales(jnp.ones((8, 128)), jnp.ones((8, 128))))
    with pytest.raises(NotImplementedError, match="Hopper"):
        trace(facts=replace(H200, compute_capability=(10, 0)))
