"""`physical_slot`: the reference, what it refuses, and its jitted form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.layout import SlotError
from kvjax.storage import physical_slots


@pytest.mark.parametrize(("position", "slot"), [(0, 36), (5, 9), (11, 71)])
def test_the_reference(position, slot):
    assert kvjax.physical_slot([9, 2, 17], 4, position) == slot


@pytest.mark.parametrize(
    ("pages", "page_size", "position", "message"),
    [
        ([9, 2, 17], 4, 12, "position=12 has no slot: 3 pages of 4 hold positions 0…11"),
        ([9, 2, 17], 4, -1, "position=-1"),
        ([], 4, 0, "position=0"),
        ([9, 2, 17], 0, 0, "page_size=0"),
        ([9, 2, 17], -4, 0, "page_size=-4"),
        ([9, -2, 17], 4, 5, r"pages\[1\]=-2"),
        ([9, 2, 17], 4, 1.0, "position=1.0"),
        ([9, 2, 17], True, 0, "page_size=True"),
    ],
)
def test_what_has_no_slot(pages, page_size, position, message):
    with pytest.raises(SlotError, match=message):
        kvjax.physical_slot(pages, page_size, position)
    assert issubclass(SlotError, ValueError) and issubclass(SlotError, IndexError)


slots = jax.jit(physical_slots, static_argnames=("page_size", "num_pages"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_jitted_form_agrees_wherever_there_is_a_slot(data):
    """And says out of range everywhere else: beyond the pages, negative, an entry that maps nothing."""
    page_size, num_pages = data.draw(st.sampled_from((1, 3, 16))), 40
    pages = data.draw(st.lists(st.integers(0, num_pages), min_size=8, max_size=8))
    edges = st.sampled_from((-(2**31), -1, 8 * page_size - 1, 8 * page_size, 2**31 - 1))
    positions = data.draw(st.lists(st.integers(-5, 9 * page_size) | edges, min_size=12, max_size=12))
    got = slots(jnp.array(pages), page_size=page_size, positions=jnp.array(positions, jnp.int32), num_pages=num_pages)
    for position, slot in zip(positions, np.asarray(got).tolist(), strict=True):
        mapped = 0 <= position < 8 * page_size and pages[position // page_size] < num_pages
        expected = kvjax.physical_slot(pages, page_size, position) if mapped else num_pages * page_size
        assert slot == expected


def test_slots_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="slots are 32 bits"):
        physical_slots(jnp.array([0]), 16, jnp.array([0]), num_pages=2**28)
