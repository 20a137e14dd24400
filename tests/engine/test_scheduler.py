"""Who runs: admission, shares and who gives way, without a device."""

import pytest

from kvjax.engine import PagedBacking, Request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.sequence import NO_ROW, Generation, Holder

PREFIX = tuple(range(10))


def make(num_pages=100, *, page_size=4, max_seqs=3, chunk=8, burst=4, prefixes=()):
    scheduler = Scheduler(PagedBacking(num_pages, page_size, 256), max_seqs=max_seqs, chunk=chunk, burst=burst)
    scheduler.prefixes.extend(prefixes)
    return scheduler


def queue(scheduler, *prompts):
    """Waiting requests of these prompts (or of prompts of these lengths) that may generate 20 tokens."""
    for prompt in prompts:
        tokens = list(range(50, 50 + prompt)) if isinstance(prompt, int) else list(prompt)
        number = len(scheduler.waiting) + len(scheduler.running)
        request = Request(tuple(tokens), max_new_tokens=20)
        scheduler.waiting.append(Generation(tokens, order=number, id=number, request=request, limit=20))


def shares(scheduler):
    return [(share.sequence.order, share.count) for share in scheduler.plan()]


def compute(scheduler):
    """Everybody computes their share, and whoever has caught up gets one more token."""
    for share in scheduler.plan():
        share.sequence.computed += share.count
        if isinstance(share.sequence, Generation) and share.sequence.pending == 0:
            share.sequence.take([0], [1.0])


def ids(generations):
    return [generation.id for generation in generations]


def test_rows_go_to_the_first_in_the_queue():
    scheduler = make()
    queue(scheduler, 3, 5, 2, 4)
    assert ids(scheduler.admit(free=100)) == [0, 1, 2] == ids(scheduler.running)
    assert sorted(one.row for one in scheduler.running) == [0, 1, 2]
    assert ids(scheduler.waiting) == [3] and scheduler.admit(free=100) == []
    scheduler.remove(scheduler.running[1])
    assert ids(scheduler.admit(free=100)) == [3]


def test_a_request_waits_until_everybody_can_finish_the_next_burst_beside_it():
    scheduler = make()
    queue(scheduler, 8, 8)  # 8 known + 3 more computed by the end of a burst of 4: three pages each
    assert ids(scheduler.admit(free=5)) == [0]
    assert ids(scheduler.admit(free=6)) == [1]


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = make()
    queue(scheduler, 8, 60, 1)
    assert ids(scheduler.admit(free=8)) == [0]


def test_the_only_request_is_admitted_however_little_is_free():
    scheduler = make()
    queue(scheduler, 60)
    assert ids(scheduler.admit(free=0)) == [0]


def test_prompts_share_the_chunk_in_order_and_decoding_comes_first():
    scheduler = make()
    queue(scheduler, 3, 20, 9)
    scheduler.admit(free=100)
    assert shares(scheduler) == [(0, 3), (1, 5)]
    compute(scheduler)
    assert shares(scheduler) == [(0, 1), (1, 7)]
    compute(scheduler)
    compute(scheduler)
    assert shares(scheduler) == [(0, 1), (1, 1), (2, 6)]


@pytest.mark.parametrize("chunk", [1, 2])
def test_prompts_get_on_even_if_decoding_fills_the_chunk(chunk):
    scheduler = make(chunk=chunk)
    queue(scheduler, 1, 1, 5)
    scheduler.admit(free=100)
    assert shares(scheduler) == [(0, 1), (1, 1), (2, 1)]


def test_the_newest_gives_way_and_waits_at_the_front_with_what_it_generated():
    scheduler = make()
    queue(scheduler, 3, 3, 3, 3)
    scheduler.admit(free=100)
    compute(scheduler)
    compute(scheduler)
    victim = scheduler.give_way()
    assert victim.id == 2 and victim.computed == 3
    scheduler.preempt(victim)
    assert ids(scheduler.running) == [0, 1] and ids(scheduler.waiting) == [2, 3]
    assert (victim.row, victim.computed, victim.pending, victim.generated) == (NO_ROW, 0, 4, [0])


def test_who_runs_alone_has_nobody_to_give_way():
    scheduler = make()
    queue(scheduler, 3)
    scheduler.admit(free=100)
    assert scheduler.give_way() is None


def test_a_prefix_is_computed_before_the_request_that_begins_with_it():
    scheduler = make(prefixes=[PREFIX[:4], PREFIX])
    queue(scheduler, (*PREFIX, 77, 78), 2)
    assert scheduler.admit(free=100) == [] and ids(scheduler.waiting) == [0, 1]
    (holder,) = scheduler.holders.values()
    assert (holder.tokens, holder.row) == (list(PREFIX), 3 + 1)
    assert shares(scheduler) == [(0, 8)]
    compute(scheduler)
    assert scheduler.admit(free=100) == []
    compute(scheduler)
    first, second = scheduler.admit(free=100)
    assert (first.holder, first.computed, first.pending) == (holder, 10, 2)
    assert (second.holder, second.computed) == (None, 0)
    # Two pages are shared; the third, half full, is copied when it is written.
    assert first.held_pages(4) == 2 and first.shared_tokens(4) == 8
    assert scheduler.useful_tokens() == 10 + 2


def test_a_prefix_gives_way_when_nobody_uses_it_or_when_its_user_is_alone():
    scheduler = make(prefixes=[PREFIX, (99, 98)])
    queue(scheduler, (*PREFIX, 77), (99, 98, 97))
    while len(scheduler.running) < 2:
        scheduler.admit(free=100)
        compute(scheduler)
    one, two = scheduler.holders.values()
    assert ids([scheduler.give_way()]) == [1]
    scheduler.remove(scheduler.running[1])
    assert scheduler.give_way() is two  # idle
    scheduler.preempt(two)
    assert scheduler.give_way() is one  # its user is alone
    scheduler.preempt(one)
    assert scheduler.holders == {} and scheduler.give_way() is None
    user = scheduler.running[0]
    assert scheduler.useful_tokens() == user.computed  # its shared pages are its own now


def test_users_of_a_dropped_prefix_still_share_and_are_counted_so():
    scheduler = make(prefixes=[PREFIX])
    queue(scheduler, (*PREFIX, 77), (*PREFIX, 78))
    while len(scheduler.running) < 2:
        scheduler.admit(free=100)
        compute(scheduler)
    (holder,) = scheduler.holders.values()
    own = [one.computed - 8 for one in scheduler.running]
    assert scheduler.useful_tokens() == 10 + sum(own)
    scheduler.preempt(holder)
    assert scheduler.useful_tokens() == 8 + sum(own)


def test_an_unfinished_prefix_gives_way_to_those_before_the_request_that_wants_it():
    scheduler = make(prefixes=[PREFIX])
    queue(scheduler, 3, (*PREFIX, 77))
    scheduler.admit(free=100)
    victim = scheduler.give_way()
    assert isinstance(victim, Holder) and victim.order == 1
