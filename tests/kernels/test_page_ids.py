"""The check of page ids takes every problem of the contract, and names what is wrong with a broken one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import page_checks
from pallas_kernels.page_ids import check_page_ids, pages_read
from tests.kernels import contract

CASES = {case.name: case for case in contract.CASES}


def check(problem, **change):
    problem = replace(problem, **change)
    check_page_ids(
        problem.pages,
        problem.tiles,
        problem.page_offset,
        total_pages=len(problem.pool),
        page_size=problem.case.page_size,
        attention=problem.attention,
    )


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_exactly_the_pages_somebody_sees_are_checked(case):
    problem = contract.make_problem(case)
    check(problem)
    read = pages_read(problem.tiles, problem.pages.shape[1], case.page_size, problem.attention)
    mapped = problem.pages != contract.UNUSED_ENTRY
    for row in range(len(case.lengths)):
        of_row = [tile for tile, (owner, _, _) in enumerate(case.tiles) if owner == row]
        np.testing.assert_array_equal(read[of_row].any(axis=0), mapped[row])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (contract.UNUSED_ENTRY, r"tile 0 \(row=0, queries=1, context=17\).*logical page 1 is page 1073741838"),
        (-1000, "logical page 1 is page -986"),
        (42 - 14, r"logical page 1 is page 42 .*of a pool of 42"),
    ],
)
def test_a_page_outside_the_pool_is_named(page, message):
    problem = contract.make_problem(contract.CASES[0])
    assert len(problem.pool) == 42 and int(problem.page_offset) == 14
    pages = problem.pages.copy()
    pages[0, 1] = page
    with pytest.raises(ValueError, match=message):
        check(problem, pages=pages)


def test_a_row_outside_the_table_and_a_context_past_it_are_named():
    problem = contract.make_problem(contract.CASES[0])
    tiles = problem.tiles
    with pytest.raises(ValueError, match=r"row=6.*its row is not one of the 6"):
        check(problem, tiles=replace(tiles, row=tiles.row.at[0].set(6)))
    with pytest.raises(ValueError, match=r"context=1000.*8 pages of 16 tokens"):
        check(problem, tiles=replace(tiles, context=tiles.context.at[0].set(1000)))


def test_attend_checks_pages_when_asked():
    spec = kvjax.CacheSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    cache = kvjax.init(spec, rows=1, num_pages=4, page_size=4, max_context=8)
    cache, grant = kvjax.reserve(cache, jnp.array([5]), max_tokens=8)
    q = jnp.ones((8, 1, 4))
    (group,) = cache.table.groups
    torn = replace(group, pages=group.pages.at[0, 1].set(4))  # as if logical page 1 had never been mapped
    torn = replace(cache, table=replace(cache.table, groups=(torn,)))
    with page_checks():
        jax.block_until_ready(kvjax.attend(cache, 0, grant, q))
        with pytest.raises(Exception, match="logical page 1 is page 4"):
            jax.block_until_ready(jax.jit(lambda cache: kvjax.attend(cache, 0, grant, q))(torn))
            jax.effects_barrier()
