"""The mirror on the host: transitions replayed on a CPU device give the same table, bit for bit; nothing is read."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from kvjax.engine import BeamOptions, BeamSearch, DraftModel, PromptLookup, Request
from kvjax.engine.mirror import Mirror, replay, without_bytes
from kvjax.engine.steps import Log
from kvjax.pages import Status
from tests.engine.serving import PREFIX, contiguous, extents, make_engine, model, paged
from tests.engine.tiny_model import VOCABULARY

SETTINGS = {
    "extents, lookup, swap": {
        "backing": extents(24, 4, max_runs=40),
        "drafter": PromptLookup(tokens=2, seen=32),
        "preemption": "swap",
        "host_bytes": 1 << 20,
    },
    "lookup, swap": {"drafter": PromptLookup(tokens=2, seen=32), "preemption": "swap", "host_bytes": 1 << 20},
    "draft model": {"drafter": DraftModel(model(), tokens=2)},
}


def assert_same_table(engine, when):
    real, mirrored = (jax.device_get(side.cache.ownership) for side in (engine._runner, engine._runner.mirror))
    for (path, one), other in zip(jax.tree.leaves_with_path(real), jax.tree.leaves(mirrored), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=f"{when}: {jax.tree_util.keystr(path)}")


def random_day(engine, seed, steps):
    """Requests, samples and cancellations at random; compares after every step and returns how many there were."""
    draw, done = np.random.default_rng(seed), 0
    engine.add_prefix(PREFIX[:9])
    while done < steps or not engine.idle:
        if done < steps and draw.random() < 0.5:
            prompt = (PREFIX[:9] if draw.random() < 0.5 else ()) + tuple(
                draw.integers(0, VOCABULARY, draw.integers(1, 30)).tolist()
            )
            request = Request(prompt, max_new_tokens=int(draw.integers(1, 20)), temperature=float(draw.integers(0, 2)))
            if draw.random() < 0.2:
                engine.submit_samples(request, 3)
            else:
                engine.submit(request)
        if engine._unfinished and draw.random() < 0.1:
            engine.cancel(int(draw.choice(list(engine._unfinished))))
        engine.step()
        done += 1
        assert_same_table(engine, f"seed {seed}, step {done}")
    cache = engine._runner.mirror.cache
    assert cache.transitions.check_invariants(cache.ownership) == []
    return done


@pytest.mark.parametrize("name", SETTINGS)
def test_both_tables_agree_over_a_long_random_run(name):
    engine = make_engine(**{"backing": paged(24, 4), "burst": 3, "mirror": True} | SETTINGS[name])
    assert random_day(engine, seed=5, steps=60) >= 60
    metrics = engine.metrics()
    assert metrics.preemptions > 0 and metrics.copies_on_write > 0 and metrics.finished["cancelled"] > 0, metrics
    assert metrics.swapped_pages > 0 or "swap" not in name
    assert metrics.drafted_tokens > metrics.accepted_tokens or "lookup" not in name
    assert metrics.compactions > 0 or "extents" not in name


def test_a_beam_search_replays_from_its_log():
    """Twelve beams that fork and die in one device call, over a pool that one prompt must leave."""
    draw, options = np.random.default_rng(2), BeamOptions(num_beams=3, max_new_tokens=10, eos=(7,))
    prompts = [draw.integers(0, VOCABULARY, size).tolist() for size in (13, 1, 30, 8)]
    beams = BeamSearch(model(), rows=12, num_pages=22, page_size=4, max_context=64, chunk=16)
    logs = []
    search = beams._search
    beams._search = lambda *args, **kwargs: (found := search(*args, **kwargs), logs.append(found[1].log))[0]
    replayed, order = without_bytes(beams.cache), np.arange(12, dtype=np.int32)
    for _ in range(2):
        assert {result.status for result in beams.run(prompts, options).results} > {Status.OK}
        again = partial(replay, paged(22, 4), 16, 0, 0, max_pages=12 * 16)
        replayed = jax.jit(again)(replayed, jax.device_get(logs[-1]), order)
    assert logs[-1].steps > 12
    for one, other in zip(jax.tree.leaves(beams.cache.table), jax.tree.leaves(replayed.table), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("field", ["reserve", "commit"])
def test_a_log_with_an_entry_off_by_one_is_noticed(monkeypatch, field):
    real = Mirror._replay

    def wrong(self, log: Log, *arguments):
        values = np.array(getattr(log, field))
        values[0, np.argmax(values[0])] -= 1
        real(self, replace(log, **{field: values}), *arguments)

    monkeypatch.setattr(Mirror, "_replay", wrong)
    with pytest.raises(AssertionError):
        random_day(make_engine(paged(24, 4), mirror=True), seed=5, steps=5)


def test_there_is_no_mirror_unasked():
    with pytest.raises(ValueError, match="make it with mirror=True"):
        _ = make_engine(paged(8, 16)).table
    with pytest.raises(ValueError, match="this one has none"):
        make_engine(contiguous(4), mirror=True)
