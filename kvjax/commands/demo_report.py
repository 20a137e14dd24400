"""What a demo says of two runs of the same questions: in one sentence, and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib

from kvjax.commands.compare import NARROW_MARGIN, Comparison
from kvjax.commands.demo_prompts import QUESTIONS
from kvjax.commands.text import one_line
from kvjax.engine import Metrics, Result, finite


def verdict(comparison: Comparison, runs: Mapping[str, Sequence[Result]]) -> str:
    """One line: "equal: …", or why not: "DIFFERENT: …", or "INCOMPLETE: …" if requests could not be served at all."""
    cache, other = runs
    worst = [one for one in comparison.divergences if not one.excused]
    if worst:
        places = ", ".join(f"request {one.request} at token {one.step} (margin {one.margin:.3g})" for one in worst)
        return f"DIFFERENT: the {cache} and the {other} cache part at {places}"
    tokens = (
        f"all {comparison.compared} tokens of the {cache} cache are those of the {other} cache "
        f"({comparison.excused} divergences excused by a top-two margin below {NARROW_MARGIN:g})"
    )
    if not comparison.failed:
        return f"equal: {tokens}"
    name, first = next((name, one) for name, results in runs.items() for one in results if one.error is not None)
    return (
        f"INCOMPLETE: {len(comparison.failed)} of {len(QUESTIONS)} requests ended with an error; first request "
        f"{first.id} of the {name} cache: {one_line(first.error)}; as far as they went, {tokens}"
    )


def report(
    model: str, comparison: Comparison, runs: Mapping[str, Sequence[Result]], metrics: Mapping[str, Metrics]
) -> dict[str, Any]:
    """All figures and the answers of the first run, as plain values."""
    return {
        "model": model,
        "command": sys.argv,
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "device": jax.devices()[0].device_kind,
        "runs": {name: one.to_json() for name, one in metrics.items()},
        "comparison": {
            "tokens_compared": comparison.compared,
            "equal": comparison.equal,
            "excused": comparison.excused,
            "divergences": [
                {"request": one.request, "step": one.step, "margin": finite(one.margin), "excused": one.excused}
                for one in comparison.divergences
            ],
            "failed": list(comparison.failed),
        },
        "answers": [
            {"question": question.text, "text": result.text, "finish_reason": result.finish_reason}
            for question, result in zip(QUESTIONS, next(iter(runs.values())), strict=True)
        ],
    }
