"""Extents keep the page table's contract in random order, whatever they prefer; and each of their own checks can fail."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.virtual.extent_walk import SETTINGS, ExtentWalk


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_transitions_match_the_page_tables_model(setting, seen):
    for seed in range(2):
        walk = ExtentWalk(setting, seed)
        for _ in range(200):
            walk.step()
        seen.update(walk.harness.counts)


def test_every_status_was_seen(seen):
    expected = ("reserve:FRAGMENTED", "reserve:OUT_OF_PAGES", "reserve:PAGES_PENDING", "adopt:STALE", "compact:OK")
    assert all(seen[name] for name in expected) and seen["copies"] > 20, seen
