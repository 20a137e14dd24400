"""Token equality with the margin at hand.

Float32 sums differ with the shape of a batch, by up to 6e-5 in a logit; where the best two logits are that close,
either token is right.  So a divergence is excused where, and only where, the top-two margin of the expected run is
below `MARGIN`.  After a divergence the two runs have read different tokens, and nothing later is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MARGIN = 2e-3


class Comparison(NamedTuple):
    """How a run compares with the expected one.

    Attributes:
      equal: no divergence, or an excused one.
      excused: 1 if the first divergence was excused, else 0; a sum over runs counts them.
      first_divergence: index of the first token that differs or is missing; None if there is none.
    """

    equal: bool
    excused: int
    first_divergence: int | None


def compare_tokens(found: Sequence[int], expected: Sequence[int], margins: Sequence[float]) -> Comparison:
    """Compares a run with the expected tokens, whose top-two logit margins are `margins`.

    A run that ends early or late diverges where the shorter one ends, and that is never excused.
    """
    if len(margins) != len(expected):
        raise ValueError(f"{len(margins)=} must equal {len(expected)=}: one margin a token")
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            excused = margins[index] < MARGIN
            return Comparison(excused, int(excused), index)
    if len(found) != len(expected):
        return Comparison(False, 0, min(len(found), len(expected)))
    return Comparison(True, 0, None)


def assert_equal_tokens(comparisons: Iterable[Comparison], what: str) -> None:
    """Every run must be equal; prints how many divergences were excused."""
    comparisons = list(comparisons)
    wrong = {run: c.first_divergence for run, c in enumerate(comparisons) if not c.equal}
    print(f"{what}: {len(comparisons)} runs, {sum(c.excused for c in comparisons)} divergences excused by their margin")
    assert not wrong, f"{what}: run → first wrong token: {wrong}"
