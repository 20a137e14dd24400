"""Whether two runs of the same requests gave the same tokens, as far as float32 can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.engine import Result

NARROW_MARGIN = 2e-3
"""Top-two logit margin below which float32 sums of another batch shape may turn the choice."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two runs of one request part.

    Attributes:
      request: its index.
      step: index of the first generated token that differs.
      margin: of the reference's choice there; infinite if one run ended where the other went on.
    """

    request: int
    step: int
    margin: float

    @property
    def excused(self) -> bool:
        return self.margin < NARROW_MARGIN


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of holding one run against another.

    Attributes:
      compared: tokens; what follows a divergence is not compared.
      divergences: where runs parted.
      failed: requests that ended with an error in one of the runs, out of pages for example.  What they got until then
        is compared; that they got no more is no difference between the runs' tokens.
    """

    compared: int
    divergences: tuple[Divergence, ...]
    failed: tuple[int, ...] = ()

    @property
    def excused(self) -> int:
        return sum(one.excused for one in self.divergences)

    @property
    def equal(self) -> bool:
        """Every token compared is equal, or excused; so it may be of requests that failed."""
        return self.excused == len(self.divergences)


def compare(results: Sequence[Result], reference: Sequence[Result]) -> Comparison:
    """Holds `results` against `reference`, request by request; of one cut short the tokens that it still got."""
    compared, divergences, failed = 0, [], []
    for index, (result, expected) in enumerate(zip(results, reference, strict=True)):
        length = min(len(result.tokens), len(expected.tokens))
        differs = [step for step in range(length) if result.tokens[step] != expected.tokens[step]]
        endings = {result.finish_reason, expected.finish_reason}
        if "error" in endings:
            failed.append(index)
        if differs:
            divergences.append(Divergence(index, differs[0], expected.margins[differs[0]]))
            compared += differs[0] + 1
            continue
        compared += length
        if not endings & {"cancelled", "error"} and len(result.tokens) != len(expected.tokens):
            divergences.append(Divergence(index, length, float("inf")))
    return Comparison(compared, tuple(divergences), tuple(failed))
