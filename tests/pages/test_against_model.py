"""Every transition in random order against a plain Python model, with the content of every position."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pages.walk import RandomWalk

SETTINGS = ("one page", "two groups", "large pages")
"""Those that the other tests of this folder compile too; the long run, `make fuzz`, walks all of them."""

EXPECTED = {
    "reserve": ("OK", "OUT_OF_PAGES", "PAGES_PENDING", "TABLE_FULL", "OVER_BOUND"),
    "commit": ("OK", "NOT_RESERVED"),
    "truncate": ("OK", "NOT_RESERVED"),
    "release": ("OK", "EMPTY", "OVER_BOUND"),
    "fork": ("OK", "ROW_BUSY", "EMPTY", "RESERVED"),
    "reorder": ("OK", "RESERVED"),
    "adopt": ("OK", "STALE", "ROW_BUSY", "TABLE_FULL", "OVER_BOUND"),
    "pin": ("OK", "STALE"),
    "unpin": ("OK", "STALE"),
    "advance": ("OK", "STALE"),
}


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_transitions_match_the_model(setting, seen):
    for seed in range(2):
        walk = RandomWalk(setting, seed)
        for _ in range(250):
            walk.step()
        seen.update(walk.harness.counts)


def test_every_status_was_seen(seen):
    """The random walk is worth something only if it meets every refusal."""
    missing = [f"{op}:{code}" for op, codes in EXPECTED.items() for code in codes if not seen[f"{op}:{code}"]]
    assert not missing and seen["copies"] > 20, (missing, seen["copies"])
