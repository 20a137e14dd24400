"""Who runs: admission, shares and who gives way, without a device."""

import pytest

from kvjax.engine import PagedBacking, Request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.sequence import NO_ROW, Generation, Holder

PREFIX = tuple(range(10))


def make(num_pages=100, *, page_size=4, max_seqs=3, chunk=8, burst=4, prefixes=()):
    backing = PagedBacking(num_pages, page_size, 256)
    scheduler = Scheduler(backing, max_seqs=max_seqs, prefix_rows=len(prefixes) + 1, chunk=chunk, burst=burst)
    scheduler.prefixes.registered.extend(prefixes)
    return scheduler


def queue(scheduler, *prompts, samples=1):
    """Waiting requests of these prompts (or of prompts of these lengths) that may generate 20 tokens.

    Each is a group of so many samples.
    """
    for prompt in prompts:
        tokens = list(range(50, 50 + prompt)) if isinstance(prompt, int) else list(prompt)
        group = len(scheduler.waiting) + len(scheduler.running)
        request = Request(tuple(tokens), max_new_tokens=20)
        for number in range(group, group + samples):
            scheduler.waiting.append(
                Generation(list(tokens), order=number, id=number, group=group, request=request, limit=20)
            )


def admit(scheduler, free=100):
    """Everybody who got a row."""
    return [one for unit in scheduler.admit(free) for one in unit]


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
    assert ids(admit(scheduler)) == [0, 1, 2] == ids(scheduler.running)
    assert sorted(one.row for one in scheduler.running) == [0, 1, 2]
    assert ids(scheduler.waiting) == [3] and admit(scheduler) == []
    scheduler.remove(scheduler.running[1])
    assert ids(admit(scheduler)) == [3]


def test_a_request_waits_until_everybody_can_finish_the_next_burst_beside_it():
    scheduler = make()
    queue(scheduler, 8, 8)  # 8 known + 3 more computed by the end of a burst of 4: three pages each
    assert ids(admit(scheduler, free=5)) == [0]
    assert ids(admit(scheduler, free=6)) == [1]


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = make()
    queue(scheduler, 8, 60, 1)
    assert ids(admit(scheduler, free=8)) == [0]


def test_the_only_request_is_admitted_however_little_is_free():
    scheduler = make()
    queue(scheduler, 60)
    assert ids(admit(scheduler, free=0)) == [0]


def test_prompts_share_the_chunk_in_order_and_decoding_comes_first():
    scheduler = make()
    queue(scheduler, 3, 20, 9)
    admit(scheduler)
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
    admit(scheduler)
    assert shares(scheduler) == [(0, 1), (1, 1), (2, 1)]


def test_the_newest_gives_way_and_waits_at_the_front_with_what_it_generated():
    scheduler = make()
    queue(scheduler, 3, 3, 3, 3)
    admit(scheduler)
    compute(scheduler)
    compute(scheduler)
    (victim,) = scheduler.give_way()
    assert victim.id == 2 and victim.computed == 3
    scheduler.preempt([victim])
    assert ids(scheduler.running) == [0, 1] and ids(scheduler.waiting) == [2, 3]
    assert (victim.row, victim.computed, victim.pending, victim.generated) == (NO_ROW, 0, 4, [0])


def test_who_runs_alone_has_nobody_to_give_way():
    scheduler = make()
    queue(scheduler, 3)
    admit(scheduler)
    assert scheduler.give_way() == []


def test_a_prefix_is_computed_before_the_request_that_begins_with_it():
    scheduler = make(prefixes=[(0, 2), PREFIX])
    queue(scheduler, (*PREFIX, 77, 78), 2)
    assert admit(scheduler) == [] and ids(scheduler.waiting) == [0, 1]
    (holder,) = scheduler.prefixes.resident.values()
    assert (holder.tokens, holder.row) == (list(PREFIX), 3)
    assert shares(scheduler) == [(0, 8)]
    compute(scheduler)
    assert admit(scheduler) == []
    compute(scheduler)
    first, second = admit(scheduler)
    assert (first.holder, first.computed, first.pending) == (holder, 10, 2)
    assert (second.holder, second.computed) == (None, 0)
    # Two pages are shared for good; the third, half full, is copied when it is written.
    assert first.held_pages(4) == 2 and first.shared_tokens(4) == 10 and scheduler.useful_tokens() == 10
    compute(scheduler)
    assert first.held_pages(4) == 3 and first.shared_tokens(4) == 8 and scheduler.useful_tokens() == 10 + 4 + 2


def test_a_prefix_gives_way_when_nobody_uses_it_or_when_its_user_is_alone():
    scheduler = make(prefixes=[PREFIX, (99, 98)])
    queue(scheduler, (*PREFIX, 77), (99, 98, 97))
    while len(scheduler.running) < 2:
        admit(scheduler)
        compute(scheduler)
    one, two = scheduler.prefixes.resident.values()
    assert ids(scheduler.give_way()) == [1]
    scheduler.remove(scheduler.running[1])
    assert scheduler.give_way() == [two]  # idle
    scheduler.preempt([two])
    assert scheduler.give_way() == [one]  # its user is alone
    scheduler.preempt([one])
    assert scheduler.prefixes.resident == {} and scheduler.give_way() == []
    user = scheduler.running[0]
    assert scheduler.useful_tokens() == user.computed  # its shared pages are its own now


def test_users_of_a_dropped_prefix_still_share_and_are_counted_so():
    scheduler = make(prefixes=[PREFIX])
    queue(scheduler, (*PREFIX, 77), (*PREFIX, 78))
    while len(scheduler.running) < 2:
        admit(scheduler)
        compute(scheduler)
    (holder,) = scheduler.prefixes.resident.values()
    own = [one.computed - 8 for one in scheduler.running]
    assert scheduler.useful_tokens() == 10 + sum(own)
    scheduler.preempt([holder])
    assert scheduler.useful_tokens() == 8 + sum(own)


def test_an_unfinished_prefix_gives_way_to_those_before_the_request_that_wants_it():
    scheduler = make(prefixes=[PREFIX])
    queue(scheduler, 3, (*PREFIX, 77))
    admit(scheduler)
    (victim,) = scheduler.give_way()
    assert isinstance(victim, Holder) and victim.order == 1


def test_a_prefix_begins_with_a_shorter_one():
    scheduler = make(prefixes=[PREFIX[:6], PREFIX])
    queue(scheduler, (*PREFIX, 77))
    admit(scheduler)
    compute(scheduler)
    (longer,) = admit(scheduler)
    shorter = scheduler.prefixes.resident[PREFIX[:6]]
    assert (longer.tokens, longer.holder, longer.computed) == (list(PREFIX), shorter, 6)
    assert scheduler.useful_tokens() == 6 and longer.held_pages(4) == 1  # the second page is copied when it is written
    compute(scheduler)
    (request,) = admit(scheduler)
    # The shorter one's row holds 6 tokens; the longer one shares its first 4; the request shares 8 with the longer.
    assert request.holder is longer and scheduler.useful_tokens() == 6 + (10 - 4)
    scheduler.preempt([longer])
    assert scheduler.useful_tokens() == 6 + (10 - 4)
    assert scheduler.give_way() == [shorter]


def start_samples(number=3, *, prompt=PREFIX, **settings):
    """A scheduler with a group of samples that have taken over their prompt."""
    scheduler = make(max_seqs=4, **settings)
    queue(scheduler, prompt, samples=number)
    assert admit(scheduler) == []
    while not scheduler.running:
        compute(scheduler)
        admit(scheduler)
    return scheduler


def test_samples_take_over_all_but_the_last_token_of_a_prompt_computed_once():
    scheduler = start_samples()
    (holder,) = scheduler.prefixes.resident.values()
    assert holder.tokens == list(PREFIX[:-1]) and scheduler.unneeded() == [holder]
    assert [(one.holder, one.computed, one.pending) for one in scheduler.running] == [(holder, 9, 1)] * 3
    assert scheduler.useful_tokens() == 9
    scheduler.remove(holder)
    assert scheduler.useful_tokens() == 9 and scheduler.unneeded() == []
    compute(scheduler)
    # Two pages are shared; the third, with one token of the prompt, is everybody's own by now.
    assert scheduler.useful_tokens() == 8 + 3 * 2 and scheduler.unshared_pages() == 3 * 3


def test_samples_come_in_together_or_not_at_all():
    scheduler = make(max_seqs=4)
    queue(scheduler, 1, 1)
    admit(scheduler)
    queue(scheduler, PREFIX, samples=3)
    assert admit(scheduler) == [] and scheduler.prefixes.resident == {}  # two rows are free
    scheduler.remove(scheduler.running[0])
    # Two pages for the prompt's whole pages and one for its rest; three samples go on to 13 tokens: two more each.
    assert admit(scheduler, free=8) == [] and scheduler.prefixes.resident == {}
    assert admit(scheduler, free=10) == [] and len(scheduler.prefixes.resident) == 1


def test_samples_go_together_and_come_back_together():
    scheduler = make(max_seqs=4)
    queue(scheduler, 3)
    admit(scheduler)
    queue(scheduler, PREFIX, samples=3)
    while len(scheduler.running) < 4:
        compute(scheduler)
        admit(scheduler)
        for holder in scheduler.unneeded():
            scheduler.remove(holder)
    group = scheduler.running[1:]
    assert scheduler.give_way() == group
    scheduler.preempt(group)
    assert list(scheduler.waiting) == group and {one.group for one in group} == {1}
    assert admit(scheduler) == []
    compute(scheduler)
    compute(scheduler)
    assert admit(scheduler) == group


def test_a_group_that_has_everything_to_itself_is_split():
    scheduler = start_samples()
    (holder,) = scheduler.prefixes.resident.values()
    scheduler.remove(holder)
    first, second, third = scheduler.running
    assert scheduler.give_way() == [third]
    scheduler.preempt([third])
    assert (first.group, second.group, third.group) == (0, 0, 2)
    assert scheduler.give_way() == [second]
    assert admit(scheduler) == [third] and third.holder is None
    assert scheduler.give_way() == [third]
    scheduler.preempt([third])
    scheduler.preempt([second])
    assert ids(scheduler.waiting) == [1, 2] and scheduler.give_way() == []


def test_a_prefix_of_samples_goes_when_they_do_not_wait_for_it_any_more():
    scheduler = make(max_seqs=4)
    queue(scheduler, PREFIX, samples=2)
    admit(scheduler)
    (holder,) = scheduler.prefixes.resident.values()
    assert scheduler.unneeded() == []
    scheduler.waiting.popleft()  # a lone sample shares with nobody
    assert scheduler.unneeded() == [holder]


def test_samples_of_one_token_have_nothing_to_share():
    scheduler = make(max_seqs=4)
    queue(scheduler, 1, samples=3)
    assert [one.holder for one in admit(scheduler)] == [None] * 3
