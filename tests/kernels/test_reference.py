"""The plain reference keeps the contract, and the contract notices what breaks it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from tests.kernels import contract

paged_decode = jax.jit(reference.paged_decode, static_argnames=("value_dim", "scale"))
CASE = contract.CASES[0]


@pytest.mark.parametrize("case", contract.CASES, ids=str)
@pytest.mark.parametrize("lane_multiple", [1, 128])
def test_reference_keeps_the_contract(case, lane_multiple):
    contract.run(paged_decode, case, lane_multiple=lane_multiple)


def test_a_problem_is_the_same_for_the_same_seed_and_differs_for_another():
    first, again, other = (contract.make_problem(CASE, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.expected, again.expected)
    assert not np.array_equal(first.expected, other.expected)


def test_most_of_a_pool_is_poison():
    problem = contract.make_problem(CASE, lane_multiple=256)
    finite = np.isfinite(problem.pool.astype(np.float32))
    assert finite.sum() == sum(CASE.lengths) * CASE.kv_heads * 2 * CASE.head_dim


def reading_one_position_too_many(q, pool, pages, row, context, page_offset, **static):
    return paged_decode(q, pool, pages, row, context + (context > 0), page_offset, **static)


def reading_the_first_layer(q, pool, pages, row, context, page_offset, **static):
    return paged_decode(q, pool, pages, row, context, 0, **static)


def reading_the_pages_in_order(q, pool, pages, row, context, page_offset, **static):
    return paged_decode(q, pool, np.sort(pages, axis=1), row, context, page_offset, **static)


def pairing_heads_the_other_way(q, *rest, **static):
    return paged_decode(q[:, ::-1], *rest, **static)[:, ::-1]


def rounding_to_fewer_bits(*args, **static):
    out = paged_decode(*args, **static)
    return out + (0.02 * jnp.abs(out)).astype(out.dtype)


def never_answering_zero(*args, **static):
    out = paged_decode(*args, **static)
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
