"""The XLA path against a float64 softmax: head ratios, widths, page sizes, dtypes, ragged prefill, poison."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention import xla
from kvjax.attention.paged import choose_backend, paged_attention
from kvjax.attention.tiled import within_block
from kvjax.attention.tiles import MAX_TILE, tile_size
from kvjax.grant import make_grant
from kvjax.layout import canonical_layout
from kvjax.spec import CacheSpec
from pallas_kernels.arguments import Attention
from pallas_kernels.hardware import H200, TPU_V6E
from tests.kernels import contract

BOUND = {"float32": 1e-5, "bfloat16": 5e-3}

CASES = {
    "9:3×64 decode": (9, 3, 64, 64, 16, "float32", [0, 1, 15, 16, 17, 300], [1, 1, 1, 1, 1, 1]),
    "32:8×128 decode, a row sits out": (32, 8, 128, 128, 32, "bfloat16", [5, 130, 0, 64], [1, 0, 1, 1]),
    "8:1×64 prefill": (8, 1, 64, 64, 16, "float32", [0, 40, 129, 3], [50, 1, 33, 0]),
    "1:1×128 pages of 128": (1, 1, 128, 128, 128, "float32", [127, 128, 1], [3, 3, 3]),
    "keys wider than values": (6, 2, 96, 48, 8, "float32", [9, 0, 31], [4, 20, 2]),
    "pages of one token": (4, 4, 32, 32, 1, "bfloat16", [0, 2, 19], [7, 1, 1]),
    "nothing granted": (4, 2, 32, 32, 4, "float32", [3, 0], [0, 0]),
}


def problem(q_heads, kv_heads, key_dim, value_dim, page_size, dtype, lengths, tokens):
    """(arguments of paged_attention, the exact answer); everything past a row's context is NaN or a huge id."""
    random = np.random.default_rng(len(lengths) * 1000 + sum(tokens))
    rows, layers, layer = len(lengths), 3, 1
    context = np.array(lengths) + np.array(tokens)
    held = -(-context // page_size)
    width, num_pages = held.max() + 3, held.sum() + 4
    pages = np.full((rows, width), 2**30, np.int32)
    permuted = random.permutation(num_pages).astype(np.int32)
    for row, start in enumerate(np.cumsum(held) - held):
        pages[row, : held[row]] = permuted[start : start + held[row]]
    round_trip = partial(jnp.asarray, dtype=dtype)
    keys = [np.asarray(round_trip(random.normal(size=(n, kv_heads, key_dim))), np.float64) for n in context]
    values = [np.asarray(round_trip(random.normal(size=(n, kv_heads, value_dim))), np.float64) for n in context]
    pool = np.full((layers * num_pages, kv_heads, page_size, key_dim + value_dim), np.nan)
    for row in range(rows):
        for position in range(context[row]):
            slot = pool[layer * num_pages + pages[row, position // page_size], :, position % page_size]
            slot[:, :key_dim], slot[:, key_dim:] = keys[row][position], values[row][position]
    packed = rows if max(tokens) <= 1 else int(sum(tokens)) + 5
    counts, committed = (jnp.asarray(values, jnp.int32) for values in (tokens, lengths))
    grant = make_grant(counts, jnp.zeros(rows, jnp.int32), committed, packed)
    q = np.asarray(round_trip(random.normal(size=(packed, q_heads, key_dim))), np.float64)
    expected = np.zeros((packed, q_heads, value_dim))
    for index, (row, position) in enumerate(zip(np.asarray(grant.row), np.asarray(grant.position), strict=True)):
        if row < rows:
            k, v = keys[row][: position + 1], values[row][: position + 1]
            logits = np.einsum("hgd,nhd->hgn", q[index].reshape(kv_heads, -1, key_dim), k) * key_dim**-0.5
            weight = np.exp(logits - logits.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            expected[index] = np.einsum("hgn,nhd->hgd", weight, v).reshape(q_heads, value_dim)
    spec = CacheSpec.uniform(layers=layers, kv_heads=kv_heads, head_dim=key_dim, value_dim=value_dim, dtype=dtype)
    layout = canonical_layout(spec.groups[0], page_size).pools[0]
    call = partial(paged_attention, layout=layout, attention=Attention(value_dim, key_dim**-0.5), backend="xla")
    arguments = {"grant": grant, "pages": jnp.asarray(pages), "page_offset": jnp.int32(layer * num_pages)}
    return jax.jit(call), (round_trip(q), round_trip(pool)), arguments, expected


@pytest.mark.parametrize("name", CASES)
def test_xla_attention_is_exact(name):
    call, (q, pool), arguments, expected = problem(*CASES[name])
    out = np.asarray(call(q, pool=pool, **arguments), np.float64)
    empty = np.asarray(arguments["grant"].row) == len(CASES[name][6])
    assert np.isfinite(out).all() and (out[empty] == 0).all()
    error = np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-9)
    assert error <= BOUND[CASES[name][5]], error


def test_float32_is_not_rounded_on_the_way():
    """Float32 products are asked for in full precision: no TF32, no bfloat16 passes."""
    call, (q, pool), arguments, _ = problem(*CASES["9:3×64 decode"])
    text = call.lower(q, pool=pool, **arguments).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.parametrize(
    ("packed", "rows", "expected"),
    [(16, 16, 1), (4, 16, 1), (17, 16, 1), (64, 16, 4), (256, 17, 8), (9999, 1, MAX_TILE)],
)
def test_tiles_follow_what_rows_bring(packed, rows, expected):
    assert tile_size(packed, rows) == expected


@pytest.mark.parametrize("block", [126, 128, 200])
def test_the_last_block_of_the_longest_context_has_no_position_past_it(block):
    """Pages of 3 or 200 tokens do not divide 2³¹: positions of the last block pass what int32 holds."""
    longest = 2**31 - 1
    ends = np.array([longest, longest - 1, longest // block * block, 1, 0])
    for index in (longest // block, longest // block - 1, 0):
        expected = index * block + np.arange(block) < ends[:, None]
        found = within_block(jnp.zeros(len(ends), jnp.int32), jnp.asarray(ends, jnp.int32), jnp.int32(index), block)
        np.testing.assert_array_equal(found, expected)


def test_backend_is_chosen_by_device_and_never_silently():
    assert choose_backend("cpu", "cpu") == "xla"
    assert choose_backend("tpu", "TPU v6 lite") == TPU_V6E
    assert choose_backend("gpu", "NVIDIA H200") == H200
    with pytest.raises(NotImplementedError, match='backend="xla"'):
        choose_backend("gpu", "NVIDIA V100")


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_xla_keeps_the_contract_of_the_kernels(case):
    contract.run(jax.jit(xla.paged_attention, static_argnames="attention"), case)
