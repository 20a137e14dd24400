"""The plain reference keeps the contract, and the contract notices what breaks it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from tests.kernels import contract

paged_attention = jax.jit(reference.paged_attention, static_argnames="attention")
CASES = {case.name: case for case in contract.CASES}
CASE = contract.CASES[0]


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_reference_keeps_the_contract(case):
    contract.run(paged_attention, case, lane_multiple=1 if case.head_dim == 64 else 128)


def test_a_problem_is_the_same_for_the_same_seed_and_differs_for_another():
    first, again, other = (contract.make_problem(CASE, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.expected, again.expected)
    assert not np.array_equal(first.expected, other.expected)


def test_most_of_a_pool_is_poison():
    problem = contract.make_problem(CASE, lane_multiple=256)
    finite = np.isfinite(problem.pool.astype(np.float32))
    assert finite.sum() == sum(CASE.lengths) * CASE.kv_heads * 2 * CASE.head_dim


def test_pages_outside_every_window_are_not_mapped():
    case = CASES["long-2:1x64-page16-bfloat16-window40-kept4"]
    mapped = contract.make_problem(case).pages[0] != contract.UNUSED_ENTRY
    assert list(np.flatnonzero(mapped)) == [0, 67, 68, 69]


def reading_one_position_too_many(q, pool, pages, tiles, page_offset, **options):
    tiles = replace(tiles, context=tiles.context + (tiles.context > 0))
    return paged_attention(q, pool, pages, tiles, page_offset, **options)


def reading_the_first_layer(q, pool, pages, tiles, page_offset, **options):
    return paged_attention(q, pool, pages, tiles, 0, **options)


def reading_the_pages_in_order(q, pool, pages, *rest, **options):
    return paged_attention(q, pool, np.sort(pages, axis=1), *rest, **options)


def pairing_heads_the_other_way(q, *rest, **options):
    return paged_attention(q[:, :, ::-1], *rest, **options)[:, :, ::-1]


def rounding_to_fewer_bits(*args, **options):
    out = paged_attention(*args, **options)
    return out + (0.02 * jnp.abs(out)).astype(out.dtype)


def never_answering_zero(*args, **options):
    out = paged_attention(*args, **options)
    return out + (out == 0).astype(out.dtype) * 1e-6


@pytest.mark.parametrize(
    "broken",
    [
        reading_one_position_too_many,
        reading_the_first_layer,
        reading_the_pages_in_order,
        pairing_heads_the_other_way,
        rounding_to_fewer_bits,
        never_answering_zero,
    ],
)
def test_the_contract_notices(broken):
    with pytest.raises(AssertionError):
        contract.run(broken, CASE)


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("ragged-4:2x64-page16-bfloat16-window20", {"window": None}),
        ("long-2:1x64-page16-bfloat16-window40-kept4", {"kept": 0}),
        ("ragged-4:2x128-page16-float32-soft-cap", {"soft_cap": None}),
        ("ragged-6:2x64-page16-bfloat16-sinks", {"sinks": None}),
        ("ragged-6:3x64-page16-bfloat16-e4m3-head", {"scales": "ones"}),
        ("ragged-4:2x128-page32-bfloat16-int8-token", {"scales": "swapped"}),
        ("chunks4-6:2x64-page16-bfloat16", {"queries": "all"}),
    ],
)
def test_the_contract_notices_a_forgotten(name, forgotten):
    def broken(q, pool, pages, tiles, page_offset, *, attention, sinks, scales):
        if "sinks" in forgotten:
            sinks = None
        elif forgotten.get("scales") == "ones":
            scales = jax.tree.map(jnp.ones_like, scales)
        elif forgotten.get("scales") == "swapped":
            scales = replace(scales, key=scales.value, value=scales.key)
        elif "queries" in forgotten:
            tiles = replace(tiles, queries=jnp.where(tiles.queries > 0, q.shape[1], 0))
        else:
            attention = replace(attention, **forgotten)
        return paged_attention(q, pool, pages, tiles, page_offset, attention=attention, sinks=sinks, scales=scales)

    with pytest.raises(AssertionError):
        contract.run(broken, CASES[name])
