"""Small stories about ownership, told step by step, whose outcome a reader can work out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import pages
from kvjax.pages import GroupShape, Status, plan

FORK, RELEASE = {"max_pages": 16}, {"max_pages": 16}


def ints(*values: int):
    return jnp.array(values, jnp.int32)


def table_with(lengths: list[int], *, num_pages: int, page_size: int = 4, width: int = 4, max_epochs: int = 16):
    """Rows of these committed lengths."""
    table = pages.make_page_table([GroupShape(num_pages, page_size, width)], rows=len(lengths), max_epochs=max_epochs)
    table, info = pages.reserve(table, ints(*lengths), max_tokens=64)
    pages.raise_for_status(info.status)
    return pages.commit(table, ints(*lengths))[0]


def fork(table, *parent: int):
    table, info = pages.fork(table, ints(*parent), **FORK)
    pages.raise_for_status(info.status)
    return table


def codes(info) -> list[Status]:
    return [Status(int(code)) for code in info.status]


def sound(table) -> bool:
    return pages.check_invariants(table) == []


def test_a_forked_child_appends_into_a_fresh_page_at_the_same_offset():
    """One page holds 3 of 4 tokens; the child's fourth lands in a page of its own, at offset 3; nobody is shared."""
    table = fork(table_with([3, 0], num_pages=4), 2, 0)
    (group,) = table.groups
    parent_page = int(group.pages[0, 0])
    assert int(group.pages[1, 0]) == parent_page and int(group.refcount[parent_page]) == 2
    table, info = pages.reserve(table, ints(0, 1), max_tokens=4)
    (group,), (copy,) = table.groups, info.copies
    child_page = int(group.pages[1, 0])
    assert child_page != parent_page
    assert (int(copy.source[1]), int(copy.target[1])) == (parent_page, child_page)
    assert int(table.length[1]) % 4 == 3  # where the append goes in that page
    assert int(group.pages[0, 0]) == parent_page
    assert [int(group.refcount[page]) for page in (parent_page, child_page)] == [1, 1]
    assert sound(table)


def test_when_all_holders_write_the_last_keeps_the_page():
    table = fork(table_with([3, 0, 0], num_pages=3), 3, 0, 0)
    shared = int(table.groups[0].pages[0, 0])
    table, info = pages.reserve(table, ints(1, 1, 1), max_tokens=4, order=ints(1, 2, 0))
    assert codes(info) == [Status.OK] * 3
    assert [int(page) == shared for page in table.groups[0].pages[:, 0]] == [False, True, False]
    assert int(table.groups[0].free) == 0 and sound(table)


def refused_copy():
    """Two rows share a tail, no page is free, and both write: the first cannot copy."""
    table = fork(table_with([3, 0], num_pages=1), 2, 0)
    return pages.reserve(table, ints(1, 1), max_tokens=4)


def test_a_keeper_is_refused_with_the_copy_it_depends_on():
    table, info = refused_copy()
    assert codes(info) == [Status.OUT_OF_PAGES] * 2 and np.asarray(table.reserved).tolist() == [3, 3]


def test_a_keeper_that_keeps_whatever_happens_would_write_a_shared_page(monkeypatch):
    """The broken twin of the rule above."""
    real = plan.writers_of_each
    monkeypatch.setattr(plan, "writers_of_each", lambda page: (*real(page)[:2], jnp.full_like(page, -1)))
    table, info = refused_copy()
    page = int(table.groups[0].pages[1, 0])
    assert codes(info)[1] == Status.OK and int(table.groups[0].refcount[page]) == 2


def test_a_pin_is_a_holder():
    """A pinned tail is copied on write, and outlives its row until it is unpinned."""
    table = table_with([3], num_pages=3)
    page = table.groups[0].pages[0, :1]
    table, _ = pages.pin(table, (page,))
    table, info = pages.reserve(table, ints(1), max_tokens=4)
    assert int(info.copies[0].source[0]) == int(page[0])
    table, _ = pages.release(table, jnp.array([True]), **RELEASE)
    assert int(table.groups[0].held) == 1
    table, done = pages.unpin(table, (page,))
    assert int(done.status[0][0]) == Status.OK and int(table.groups[0].held) == 0
    table, again = pages.unpin(table, (page,))
    assert int(again.status[0][0]) == Status.STALE and sound(table)


def test_unpinning_more_often_than_pinned_takes_nothing():
    table = table_with([4], num_pages=2)
    page = int(table.groups[0].pages[0, 0])
    table, _ = pages.pin(table, (ints(page),))
    table, info = pages.unpin(table, (ints(page, page),))
    assert np.asarray(info.status[0]).tolist() == [Status.STALE] * 2
    assert int(table.groups[0].pins[page]) == 1 and sound(table)


def test_a_row_released_twice_is_empty_the_second_time():
    table = table_with([9, 2], num_pages=8)
    table, first = pages.release(table, jnp.array([True, False]), **RELEASE)
    table, second = pages.release(table, jnp.array([True, False]), **RELEASE)
    assert codes(first) == [Status.OK] * 2 and codes(second) == [Status.EMPTY, Status.OK]
    assert int(table.groups[0].limbo) == 3 and sound(table)


def test_pages_wait_for_the_epoch_that_could_still_touch_them():
    table = table_with([8], num_pages=2)
    freed_in = int(table.epoch)
    table, _ = pages.release(table, jnp.array([True]), **RELEASE)
    table, _ = pages.advance(table, jnp.int32(freed_in - 1))
    table, info = pages.reserve(table, ints(1), max_tokens=4)
    assert codes(info) == [Status.PAGES_PENDING]
    table, _ = pages.advance(table, jnp.int32(freed_in))
    table, info = pages.reserve(table, ints(1), max_tokens=4)
    assert codes(info) == [Status.OK] and sound(table)


def test_epochs_wrap_around():
    table = table_with([8], num_pages=2)
    last = jnp.int32(2**31 - 1)
    table = type(table)(table.length, table.reserved, table.groups, last, last - 1, table.faults)
    table, _ = pages.release(table, jnp.array([True]), **RELEASE)
    for _ in range(3):
        table, info = pages.advance(table, table.epoch)
        assert int(info.status) == Status.OK
    assert int(table.epoch) == -(2**31) + 2 and int(table.groups[0].free) == 2


def test_rows_are_served_strictly_in_order():
    """After the first that does not fit nobody who needs a page is served, however little it needs."""
    table = table_with([1, 1, 1, 2], num_pages=6)
    table, info = pages.reserve(table, ints(1, 12, 4, 2), max_tokens=64)
    assert codes(info) == [Status.OK, Status.OUT_OF_PAGES, Status.OUT_OF_PAGES, Status.OK]
    table, info = pages.reserve(table, ints(0, 12, 4, 0), max_tokens=64, order=ints(0, 9, 1, 0))
    assert codes(info) == [Status.OK, Status.OUT_OF_PAGES, Status.OK, Status.OK]


def test_a_refusal_in_one_group_leaves_every_group_alone():
    groups = (GroupShape(8, 4, 4), GroupShape(1, 4, 4))
    table = pages.make_page_table(groups, rows=1)
    table, info = pages.reserve(table, ints(5), max_tokens=8)
    assert codes(info) == [Status.OUT_OF_PAGES]
    assert [int(group.free) for group in table.groups] == [8, 1] and np.asarray(table.reserved).tolist() == [0]


def test_beams_trade_places_at_once():
    """Rows swap, die and multiply in one reorder; release-then-fork would have freed what is needed."""
    table = table_with([4, 8, 2, 1], num_pages=5)
    before = np.asarray(table.groups[0].pages)
    table, info = pages.reorder(table, ints(1, 0, 1, 4), max_pages=16)
    after = np.asarray(table.groups[0].pages)
    assert codes(info) == [Status.OK] * 4
    assert (after[0, :2] == before[1, :2]).all() and (after[2, :2] == before[1, :2]).all()
    assert after[1, 0] == before[0, 0] and int(table.groups[0].end[3]) == 0
    assert int(table.groups[0].limbo) == 2 and sound(table)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_pages": 0, "page_size": 4, "width": 4}, "num_pages=0"),
        ({"num_pages": 4, "page_size": 0, "width": 4}, "page_size=0"),
        ({"num_pages": 4, "page_size": 1 << 16, "width": 1 << 16}, "32 bits"),
        ({"num_pages": 1 << 30, "page_size": 1, "width": 1}, "32 bits"),
        ({"num_pages": 4.0, "page_size": 1, "width": 1}, "integer"),
    ],
)
def test_impossible_sizes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        GroupShape(**shape)


def test_a_corrupted_table_is_noticed():
    """Each kind of damage is named by the audit."""
    table = table_with([5, 2], num_pages=6)
    (group,) = table.groups

    def damaged(**fields):
        return type(table)(
            table.length,
            table.reserved,
            (type(group)(**{name: fields.get(name, getattr(group, name)) for name in group.__slots__}),),
            table.epoch,
            table.completed,
            table.faults,
        )

    cases = {
        "refcount=2 but 1 holders": damaged(refcount=group.refcount.at[0].set(2)),
        "is not num_pages": damaged(head=group.head + 1),
        "stands in the ring twice": damaged(ring=group.ring.at[4].set(3)),
        "column 0 holds 77, no page": damaged(pages=group.pages.at[0, 0].set(77)),
        "column 3 holds 1 but is not mapped": damaged(pages=group.pages.at[0, 3].set(1)),
        "do not fit page_size": damaged(end=group.end.at[0].set(1)),
        "is outside": damaged(tail=group.tail + 100),
    }
    for message, broken in cases.items():
        assert any(message in line for line in pages.check_invariants(broken)), message
    assert any(
        "faults" in line
        for line in pages.check_invariants(
            type(table)(table.length, table.reserved, table.groups, table.epoch, table.completed, ints(1)[0])
        )
    )


def test_a_double_free_sets_a_sticky_fault():
    """Damage that correct use cannot produce is noticed on the device: a refcount too low for its holders."""
    table = fork(table_with([4, 0], num_pages=2), 2, 0)
    (group,) = table.groups
    broken = type(group)(
        **{name: getattr(group, name) for name in group.__slots__} | {"refcount": group.refcount.at[0].set(1)}
    )
    table = type(table)(table.length, table.reserved, (broken,), table.epoch, table.completed, table.faults)
    table, _ = pages.release(table, jnp.array([True, True]), **RELEASE)
    assert pages.Fault(int(table.faults)) & pages.Fault.UNDERFLOW
    table, _ = pages.advance(table, table.epoch)
    assert pages.Fault(int(table.faults)) & pages.Fault.UNDERFLOW
