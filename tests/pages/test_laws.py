"""The six laws of ownership, each shown to hold on its own, and each with broken twins that the checks catch."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

from kvjax import pages
from kvjax.pages import Status
from tests.cache_walk import CacheWalk, make_cache
from tests.pages.harness import NO_PAGE, SETTINGS, Harness, compiled
from tests.pages.twins import TWINS
from tests.pages.walk import RandomWalk

SETTING = "two groups"


def harness() -> Harness:
    """Row 0 holds 4 tokens, in two pages of the first group (3 positions) and one of the second (5)."""
    made = Harness(SETTINGS[SETTING])
    made.reserve([4, 0, 0, 0, 0])
    made.commit([4, 0, 0, 0, 0])
    made.compare()
    return made


def pages_of(made: Harness, row: int) -> list[list[int]]:
    return [group.pages[row, : group.end[row]].tolist() for group in made.view.groups]


def free_pages(made: Harness) -> list[int]:
    return [int(group.free) for group in made.view.groups]


def same(before: pages.PageTable, after: pages.PageTable) -> bool:
    return all((a == b).all() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_law_1_refcount_is_the_number_of_holders():
    """Counted afresh from the page tables and the pins after every operation."""
    walk = RandomWalk(SETTING, seed=11)
    for _ in range(150):
        walk.step()
        for group in walk.harness.view.groups:
            holders = Counter({page: int(pins) for page, pins in enumerate(group.pins)})
            for row, end in zip(group.pages, group.end, strict=True):
                holders.update(row[:end].tolist())
            assert all(group.refcount[page] == holders[page] for page in range(group.num_pages))


def test_law_2_a_shared_page_is_copied_before_it_is_written():
    """The child's write lands in pages of its own, at the same offset; the parent's and the full page stay shared."""
    made = harness()
    made.fork([5, 0, 5, 5, 5])
    shared = pages_of(made, 0)
    assert pages_of(made, 1) == shared
    made.reserve([0, 1, 0, 0, 0])
    assert made.counts["copies"] == 2 and pages_of(made, 0) == shared
    (first, second), (only,) = pages_of(made, 1)
    assert first == shared[0][0] and second != shared[0][1] and only != shared[1][0]
    made.compare()
    made.release([True, True, False, False, False])
    made.reserve([1, 0, 0, 0, 0])  # nothing is shared: nothing is copied
    assert made.counts["copies"] == 2


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_law_3_no_page_is_reused_before_the_epoch_that_may_touch_it_is_complete(behind):
    made = harness()
    before = free_pages(made)
    made.release([True, False, False, False, False])
    dropped_in = made.model.epoch
    while made.model.epoch < dropped_in + behind:
        assert free_pages(made) == before
        made.advance(made.model.epoch - (dropped_in - 1))
    made.advance(behind)
    assert free_pages(made) == [16, 9]
    made.compare()


def test_law_3_a_pinned_page_outlives_its_rows_and_every_epoch():
    """What a copy in flight reads is pinned: release and epochs do not free it, no row may write it."""
    made = harness()
    made.pin([[(0, 1), NO_PAGE, NO_PAGE], [(0, 0), NO_PAGE, NO_PAGE]])
    pinned = [pin.physical for pin in made.pinned]
    made.reserve([1, 0, 0, 0, 0])
    assert made.counts["copies"] == 2  # the pinned tails are left as they are
    made.release([True, False, False, False, False])
    for _ in range(3):
        made.advance(0)
        made.compare()
    assert [int(group.refcount[page]) for group, page in zip(made.view.groups, pinned, strict=True)] == [1, 1]
    made.unpin([[0], [1]])
    made.advance(0)
    assert free_pages(made) == [16, 9]
    made.compare()


@pytest.mark.parametrize("how", ["finish", "preempt and come back", "roll back"])
def test_law_4_what_is_given_up_is_given_up_exactly_once(how):
    """The last of two holders frees a page, in one call or in two; a second time there is nothing to give up."""
    made = harness()
    made.fork([5, 0, 5, 5, 5])
    if how == "roll back":
        made.truncate([0, 0, 0, 0, 0], [True, True, False, False, False])
        made.truncate([0, 0, 0, 0, 0], [True, True, False, False, False])
    else:
        made.release([True, how == "finish", False, False, False])
        made.release([True, True, False, False, False])
    assert made.counts["release:EMPTY"] == {"finish": 2, "preempt and come back": 1, "roll back": 0}[how]
    assert [int(group.limbo) for group in made.view.groups] == [2, 1]
    made.advance(0)
    if how == "preempt and come back":
        made.reserve([4, 0, 0, 0, 0])
        made.release([True, False, False, False, False])
        made.advance(0)
    assert free_pages(made) == [16, 9]
    made.compare()


def test_law_5_table_and_length_move_together():
    """Mapped pages are those of the reserved positions after every step, and a refusal changes no leaf at all."""
    walk = RandomWalk(SETTING, seed=12)
    refused = 0
    for _ in range(200):
        before = walk.harness.view
        walk.step()
        after = walk.harness.view
        for group in after.groups:
            assert (group.end == -(-after.reserved // group.page_size)).all()
            assert (after.length <= after.reserved).all()
        table, info = compiled()["reserve"](before, np.full(5, 12, np.int32), max_tokens=12, order=None)
        if (np.asarray(info.status)[:1] != Status.OK).all() and not np.asarray(info.tokens).any():
            refused += 1
            assert same(before, jax.tree.map(np.asarray, table))
    assert refused > 5


def test_law_6_what_was_never_written_is_never_read():
    """NaN in every slot that no row has committed reaches no result."""
    walk = CacheWalk(make_cache(3, 24), seed=6)
    walk.run(15)
    assert walk.checked > 100


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"law {twin.law}: {twin.name}")
def test_a_broken_twin_is_caught(twin):
    assert twin.caught_after(seed=0) is not None
