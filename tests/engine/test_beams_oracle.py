"""Beam search gives the sequences and scores of Hugging Face transformers, option by option.

tests/fixtures/beams_*.json were recorded by tests/oracle/make_fixtures.py, one prompt at a time, float32 on a CPU.
Another sequence is excused where, and only where, a decision of our search was narrower than `MARGIN`; how many were is
printed.

    python -m tests.engine.test_beams_oracle        all searches of SmolLM2, a minute or two of two cores
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import groupby

import numpy as np
import pytest

import kvjax
from kvjax.engine import BeamOptions, BeamResult, BeamSearch, beam_rules
from kvjax.models import load
from tests.margins import MARGIN
from tests.models.decoding import FIXTURES

TINY = ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]


def cases_of(model: str, **options: object) -> list[dict]:
    """The oracle's searches with a model and these options."""
    name = "beams_smollm2.json" if model == "smollm2" else "beams_tiny.json"
    cases = json.loads((FIXTURES / name).read_text())["cases"]
    return [
        case
        for case in cases
        if case["model"] == model and all(case["options"][option] == value for option, value in options.items())
    ]


def options_of(case: dict) -> BeamOptions:
    return BeamOptions(**case["options"] | {"eos": tuple(case["options"]["eos"])})


def differences(result: BeamResult, case: dict) -> list[str]:
    """What is not as transformers has it."""
    found = []
    for ours, tokens, score in zip(result.hypotheses, case["sequences"], case["scores"], strict=True):
        if list(ours.tokens) != tokens:
            found.append(f"tokens {ours.tokens}, expected {tokens}")
        # A penalty of −1 multiplies a sum by its length; what float32 can tell apart grows with it.
        elif abs(ours.score - score) > 1e-3 * max(1, abs(score) / 100):
            found.append(f"score {ours.score}, expected {score}")
    return found


def assert_equal(results: list[BeamResult], cases: list[dict], what: str) -> None:
    """All equal, but for what a narrow margin excuses."""
    assert len(results) == len(cases) > 0
    wrong, excused = {}, 0
    for index, (result, case) in enumerate(zip(results, cases, strict=True)):
        found = differences(result, case)
        if found and result.margin < MARGIN:
            excused += 1
        elif found:
            wrong[index] = found
    errors = [
        abs(hypothesis.score - score)
        for result, case in zip(results, cases, strict=True)
        for hypothesis, score in zip(result.hypotheses, case["scores"], strict=True)
    ]
    ended = sum(
        len(hypothesis.tokens) < case["options"]["max_new_tokens"]
        for result, case in zip(results, cases, strict=True)
        for hypothesis in result.hypotheses
    )
    print(
        f"{what}: {len(cases)} searches, {len(errors)} sequences, {ended} of them ended early; largest difference of a "
        f"score {max(errors):.1e}; {excused} divergences excused by their margin"
    )
    assert not wrong, wrong
    assert excused <= len(cases) // 20
    assert ended > 0


@pytest.fixture(scope="module")
def search_of():
    """The search with a tiny model, one prompt at a time; compiled for each size once."""

    @cache
    def make(name: str) -> BeamSearch:
        return BeamSearch(load(FIXTURES / name).model, rows=6, num_pages=64, page_size=4, max_context=72)

    return make


def search_all(search: BeamSearch, cases: list[dict], **wrong: object) -> list[BeamResult]:
    options = [replace(options_of(case), **wrong) for case in cases]
    return [search.run([case["ids"]], one).results[0] for case, one in zip(cases, options, strict=True)]


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(search_of, name):
    """Penalties −1, 0, 1 and 2, each with each early stopping, one to all sequences returned, ends met early."""
    cases = cases_of(name)
    assert_equal(search_all(search_of(name), cases), cases, name)
    assert kvjax.check_invariants(search_of(name).cache.table) == []


def compare_smollm2(cases: list[dict]) -> None:
    """Up to eight prompts at a time."""
    search = BeamSearch(load("smollm2").model, rows=32, num_pages=160, page_size=16, max_context=72)
    results = []
    for _, group in groupby(cases, key=lambda case: case["options"]):
        batch = list(group)
        results += search.run([case["ids"] for case in batch], options_of(batch[0])).results
    assert_equal(results, cases, "SmolLM2")
    assert kvjax.check_invariants(search.cache.table) == []


def test_smollm2():
    """Eight prompts of 32 tokens, 4 beams, two settings; run as a program this compares 2 and 6 beams as well."""
    cases = [case for case in cases_of("smollm2", num_beams=4) if case["options"].get("early_stopping") != "never"]
    assert len(cases) == 16 and all(case["options"]["max_new_tokens"] == 32 for case in cases)
    compare_smollm2(cases)


def wrong_parents(beams, logits, rules):
    extended, parent = beam_rules.extend(beams, logits, rules)
    return extended, parent[:, ::-1]


def test_a_wrong_option_or_parent_is_noticed(search_of, monkeypatch):
    """The comparison can fail."""

    def share_of_different(search: BeamSearch, **wrong: object) -> float:
        results = search_all(search, cases, **wrong)
        return float(np.mean([bool(differences(*pair)) for pair in zip(results, cases, strict=True)]))

    cases = [case for case in cases_of("tiny-llama", num_beams=4) if case["options"]["eos"]]
    for name, value in (("length_penalty", 0.5), ("early_stopping", True), ("eos", (254, 255))):
        assert share_of_different(search_of("tiny-llama"), **{name: value}) > 0.1, name

    monkeypatch.setattr("kvjax.engine.beam_loop.extend", wrong_parents)
    model = load(FIXTURES / "tiny-llama").model
    search = BeamSearch(model, rows=4, num_pages=64, page_size=4, max_context=72)
    assert share_of_different(search) == 1


if __name__ == "__main__":
    compare_smollm2(cases_of("smollm2"))
