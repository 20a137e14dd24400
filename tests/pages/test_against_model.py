"""Every transition in random order against a plain Python model, with the content of every position."""

from __future__ import annotations

import pytest

from kvjax.pages import GroupShape
from tests.pages.model import Harness, jitted

SHAPES = {
    "one page": (GroupShape(1, 4, 2),),
    "small pages": (GroupShape(13, 1, 9),),
    "uniform": (GroupShape(14, 4, 5),),
    "large page": (GroupShape(7, 256, 1),),
    "two groups": (GroupShape(16, 3, 6), GroupShape(9, 5, 4)),
    "state and window": (GroupShape(4, 64, 1), GroupShape(20, 2, 9)),
}


@pytest.fixture(scope="module")
def operations():
    return jitted()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_random_transitions_match_the_model(operations, name, seed):
    harness = Harness(SHAPES[name], rows=5, seed=seed, operations=operations)
    for _ in range(150):
        harness.step()


def test_every_status_was_seen(operations):
    """The random walk is worth something only if it meets every refusal."""
    seen = {}
    for seed, name in enumerate(SHAPES):
        harness = Harness(SHAPES[name], rows=5, seed=100 + seed, operations=operations)
        for _ in range(150):
            harness.step()
        seen = {key: seen.get(key, 0) + count for key, count in harness.counts.items()} | {
            key: seen[key] for key in seen if key not in harness.counts
        }
    expected = {
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
    missing = [f"{op}:{code}" for op, codes in expected.items() for code in codes if not seen.get(f"{op}:{code}")]
    assert not missing and seen["copies"] > 20, (missing, seen.get("copies"))
