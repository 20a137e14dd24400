"""A burst alone: many steps in one call, rows that stop each for its own reason, and go on where they stood."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.engine import NoDrafts, PromptLookup, Request
from kvjax.engine.batch import make_decode, make_feed, make_slots
from kvjax.engine.burst import decode_burst
from kvjax.engine.scheduler import Share
from kvjax.engine.sequence import Generation
from kvjax.engine.steps import mixed_step, release_rows
from kvjax.pages import Status
from tests.engine.serving import PROMPTS, expected, model, paged

STEPS, ROWS = 12, 4


class Device:
    """A cache and the functions of the engine on it, without an engine."""

    def __init__(self, num_pages, drafter):
        self.backing, self.drafter = paged(num_pages, 4), drafter
        self.cache = self.backing.init(model().spec, ROWS)
        self._burst = jax.jit(partial(decode_burst, model(), self.backing, drafter, STEPS, None), donate_argnums=1)
        self._mixed = jax.jit(partial(mixed_step, model(), self.backing), donate_argnums=1)

    def prefill(self, generations):
        shares = [Share(one, one.pending) for one in generations]
        feed = make_feed(shares, rows=ROWS, bucket=256)
        slots = make_slots(generations, rows=ROWS, number=ROWS)
        self.cache, report = self._mixed(model().parameters, self.cache, feed, slots)
        return self._take(generations, report)

    def burst(self, generations, steps=STEPS):
        decode = make_decode(
            generations, rows=ROWS, number=ROWS, steps=steps, yield_early=False, seen=self.drafter.seen
        )
        slots = make_slots(generations, rows=ROWS, number=ROWS)
        self.cache, report = self._burst(model().parameters, self.cache, decode, slots)
        return self._take(generations, report)

    def release(self, row):
        mask = jnp.arange(ROWS) == row
        self.cache, _, _ = release_rows(self.backing, 64, self.cache, mask)

    def _take(self, generations, report):
        report = jax.device_get(report)
        for slot, one in enumerate(generations):
            one.computed += int(report.committed[one.row])
            number = int(report.produced[slot])
            one.take(report.tokens[slot, :number].tolist(), report.margins[slot, :number].tolist())
        assert kvjax.check_invariants(self.cache.table) == []
        return report


def generation(row, prompt, limit, eos=()):
    request = Request(prompt, max_new_tokens=limit, eos=eos)
    return Generation(list(prompt), order=row, id=row, group=row, row=row, request=request, limit=limit)


DRAFTERS = {"plain": NoDrafts(), "drafts": PromptLookup(tokens=3, longest=2, seen=32)}


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_row_stops_by_itself_and_the_burst_when_all_have(name):
    device = Device(64, DRAFTERS[name])
    tokens = [expected(prompt)[0] for prompt in PROMPTS[:3]]
    eos = tokens[2][4]
    rows = [generation(0, PROMPTS[0], 3), generation(1, PROMPTS[1], 7), generation(2, PROMPTS[2], 24, eos=(eos,))]
    device.prefill(rows)
    report = device.burst(rows)
    assert [one.generated for one in rows] == [tokens[0][:3], tokens[1][:7], tokens[2][: tokens[2].index(eos) + 1]]
    assert report.log.steps < STEPS or name == "plain"
    assert not report.status.any() and report.produced[3] == 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_without_a_page_stops_with_its_status_and_goes_on_when_there_is_one(name):
    """Two rows in a pool for little more than their prompts: the later one is refused, and loses nothing."""
    rows = [generation(0, PROMPTS[0], 20), generation(1, PROMPTS[2], 20)]
    pages = sum(-(-len(one.tokens) // 4) for one in rows) + 2
    device = Device(pages, DRAFTERS[name])
    device.prefill(rows)
    report = device.burst(rows)
    assert report.status[1] == Status.OUT_OF_PAGES and report.log.steps < STEPS
    stood = list(rows[1].generated)
    assert 0 < len(stood) < 20 and stood == expected(PROMPTS[2])[0][: len(stood)]
    device.release(0)
    for _ in range(4):
        if rows[1].remaining:
            report = device.burst(rows[1:])
    assert not report.status.any() and rows[1].generated == expected(PROMPTS[2])[0][:20]


def test_a_burst_of_nobody_does_nothing():
    device = Device(8, NoDrafts())
    before = jax.device_get(device.cache.table)
    report = device.burst([])
    assert report.log.steps == 0 and not report.produced.any()
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(device.cache.table))
