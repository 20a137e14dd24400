"""`rewind`: tokens are taken back, pages are kept, and never a page that somebody else holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Status, pages

PAGE = 4


@pytest.fixture(scope="module")
def table():
    """Row 0 holds 10 committed tokens and 14 reserved, row 1 shares the first 6 of them."""
    table = pages.make_page_table([pages.GroupShape(8, PAGE, 6)], rows=3)
    table, _ = pages.reserve(table, jnp.array([14, 0, 0]), max_tokens=16)
    table, _ = pages.commit(table, jnp.array([10, 0, 0]))
    ids = jnp.zeros((3, 2), jnp.int32).at[1].set(table.groups[0].pages[0, :2])
    table, info = pages.adopt(table, [ids], jnp.array([0, 6, 0]), max_pages=4)
    pages.raise_for_status(info.status)
    return table


def _rewind(table, length, **options):
    table, info = jax.jit(pages.rewind, static_argnames="max_pages")(table, jnp.array(length), **options)
    assert pages.check_invariants(table) == []
    return table, info.status.tolist()


def test_length_moves_and_pages_stay(table):
    after, status = _rewind(table, [5, 6, 0], max_pages=8)
    assert status == [Status.OK] * 3
    assert after.length.tolist() == [5, 6, 0] and after.reserved.tolist() == table.reserved.tolist()
    np.testing.assert_array_equal(after.groups[0].pages, table.groups[0].pages)


def test_the_shared_page_it_ends_in_is_copied_by_the_next_reserve(table):
    after, _ = _rewind(table, [5, 6, 0], max_pages=8)
    _, info = pages.reserve(after, jnp.array([1, 0, 0]), max_tokens=8)
    assert info.copies[0].source[0] == table.groups[0].pages[0, 1]


def test_pages_past_it_with_other_holders_are_refused(table):
    """At length 3 the row would write into its second page, which row 1 holds, without a look at it."""
    after, status = _rewind(table, [3, 6, 0], max_pages=8)
    assert status == [Status.SHARED, Status.OK, Status.OK]
    assert after.length.tolist() == table.length.tolist()


@pytest.mark.parametrize(
    ("length", "max_pages", "expected"),
    [
        ([11, 6, 0], 8, [Status.NOT_RESERVED, Status.OK, Status.OK]),
        ([-1, 6, 0], 8, [Status.NOT_RESERVED, Status.OK, Status.OK]),
        ([5, 7, 0], 8, [Status.OK, Status.NOT_RESERVED, Status.OK]),
        ([5, 6, 0], 1, [Status.OVER_BOUND, Status.OK, Status.OK]),
    ],
)
def test_refusals_leave_the_row(table, length, max_pages, expected):
    after, status = _rewind(table, length, max_pages=max_pages)
    assert status == expected
    refused = [row for row, code in enumerate(expected) if code != Status.OK]
    assert all(after.length[row] == table.length[row] for row in refused)


def test_rows_not_chosen_are_left_alone(table):
    after, status = _rewind(table, [0, 0, 0], max_pages=8, rows=jnp.array([False, True, True]))
    assert status == [Status.OK, Status.SHARED, Status.OK]
    assert after.length.tolist() == [10, 6, 0]
