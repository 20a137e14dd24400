"""How many pages beam search saves by sharing them, on SmolLM2 and real questions.

    python -m experiments.beam_sharing [--beams 2,4,6] [--system] [--json FILE]

The figure is that of PagedAttention (Kwon et al. 2023, §6.3): pages saved by sharing over the pages that the same beams
would hold without it, at page size 16; there for OPT-13B, 37.6–55.2 % on Alpaca (short prompts) and 44.3–66.3 % on
ShareGPT (long ones), with 2 to 6 beams.  Here for each step of one batch: the mean weighs every step by its pages, the
peak is the step in which most pages were held.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib
from absl import app, flags

from experiments.figures import write_figures
from kvjax.commands.demo_prompts import QUESTIONS, SYSTEM
from kvjax.engine import BeamOptions, BeamReport, BeamSearch
from kvjax.models import LoadedModel, load

BEAMS = flags.DEFINE_list("beams", ["2", "4", "6"], "Numbers of beams.")
PROMPTS = flags.DEFINE_integer("prompts", 8, "Questions in the batch.", lower_bound=1, upper_bound=len(QUESTIONS))
SYSTEM_PROMPT = flags.DEFINE_boolean("system", False, "Put the demo's system prompt before each question.")
NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of the longest hypothesis.", lower_bound=1)
PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "Token positions a page.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def read_questions(loaded: LoadedModel, number: int, *, system: bool) -> list[list[int]]:
    """Chat prompts, each with pages of its own: a system prompt is not shared between them here."""
    if loaded.tokenizer is None:
        raise RuntimeError(f"{loaded.name} has no tokenizer")
    before = [{"role": "system", "content": SYSTEM}] if system else []
    return [
        loaded.tokenizer.encode_chat([*before, {"role": "user", "content": question.text}])
        for question in QUESTIONS[:number]
    ]


def measure(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_beams: int, max_new_tokens: int, page_size: int
) -> tuple[BeamReport, float]:
    """The report of one batch, and the seconds it took, compilation included."""
    context = max(map(len, prompts)) + max_new_tokens
    rows = len(prompts) * num_beams
    search = BeamSearch(
        loaded.model,
        rows=rows,
        num_pages=rows * -(-context // page_size),
        page_size=page_size,
        max_context=context,
    )
    options = BeamOptions(num_beams=num_beams, max_new_tokens=max_new_tokens, eos=loaded.eos)
    start = time.perf_counter()
    report = search.run(prompts, options)
    seconds = time.perf_counter() - start
    errors = [result.error for result in report.results if result.error is not None]
    if errors:
        raise RuntimeError(f"a search failed: {errors[0]}")
    return report, seconds


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    device = jax.devices()[0]
    loaded = load("smollm2")
    prompts = read_questions(loaded, PROMPTS.value, system=SYSTEM_PROMPT.value)
    lengths = sorted(map(len, prompts))
    print(f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    print(
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, up to {NEW_TOKENS.value} more, pages of "
        f"{PAGE_SIZE.value} tokens"
    )
    print(
        f"{'beams':>5} {'steps':>5} {'saved, mean':>12} {'saved, peak':>12} {'held / unshared, peak':>22} {'copies':>7}"
    )
    records: list[dict[str, Any]] = []
    for num_beams in map(int, BEAMS.value):
        report, seconds = measure(loaded, prompts, num_beams, NEW_TOKENS.value, PAGE_SIZE.value)
        held, unshared = report.peak
        print(
            f"{num_beams:>5} {len(report.held):>5} {report.saved:>12.1%} {report.saved_at_peak:>12.1%} "
            f"{f'{held} / {unshared}':>22} {report.copies:>7}",
            flush=True,
        )
        records.append(
            {
                "beams": num_beams,
                "saved": report.saved,
                "saved_at_peak": report.saved_at_peak,
                "copies": report.copies,
                "held": report.held,
                "unshared": report.unshared,
                "seconds_with_compilation": seconds,
                "answers": [list(result.hypotheses[0].tokens) for result in report.results],
            }
        )
    if JSON.value:
        write_figures(
            JSON.value,
            model=loaded.name,
            prompt_tokens=[len(prompt) for prompt in prompts],
            max_new_tokens=NEW_TOKENS.value,
            page_size=PAGE_SIZE.value,
            records=records,
        )


if __name__ == "__main__":
    app.run(main)
