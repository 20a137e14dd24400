"""Beam search gives the sequences and scores of Hugging Face transformers, option by option.

tests/fixtures/beams_*.json were recorded by tests/oracle/make_fixtures.py, one prompt at a time, float32 on a CPU.
Another sequence is excused where, and only where, a decision of our search was narrower than `MARGIN`; how many were is
printed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

import kvjax
from kvjax.engine import BeamOptions, BeamResult, BeamSearch, beam_rules
from kvjax.models import load
from tests.margins import MARGIN
from tests.models.decoding import FIXTURES

CASES = [
    case
    for name in ("beams_tiny.json", "beams_smollm2.json")
    for case in json.loads((FIXTURES / name).read_text())["cases"]
]
TINY = ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]


def cases_of(model: str, **options: object) -> list[dict]:
    return [
        case
        for case in CASES
        if case["model"] == model and all(case["options"][name] == value for name, value in options.items())
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


@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name):
    """Penalties −1, 0, 1 and 2, each with each early stopping, one to all sequences returned, ends met early."""
    cases = cases_of(name)
    search = BeamSearch(load(FIXTURES / name).model, rows=6, num_pages=64, page_size=4, max_context=72)
    assert_equal([search.run([case["ids"]], options_of(case)).results[0] for case in cases], cases, name)
    assert kvjax.check_invariants(search.cache.table) == []


def test_smollm2():
    """Eight prompts at a time."""
    loaded = load("smollm2")
    search = BeamSearch(loaded.model, rows=32, num_pages=160, page_size=16, max_context=72)
    results, cases = [], []
    for _, group in groupby(cases_of("smollm2", num_beams=4), key=lambda case: case["options"]):
        batch = list(group)
        assert len(batch) == 8 and batch[0]["options"]["max_new_tokens"] == 32
        cases += batch
        results += search.run([case["ids"] for case in batch], options_of(batch[0])).results
    assert_equal(results, cases, "SmolLM2")
    assert kvjax.check_invariants(search.cache.table) == []


def wrong_parents(beams, logits, rules):
    extended, parent = beam_rules.extend(beams, logits, rules)
    return extended, parent[:, ::-1]


def test_a_wrong_option_or_parent_is_noticed(monkeypatch):
    """The comparison can fail."""
    cases = [case for case in cases_of("tiny-llama", num_beams=4) if case["options"]["eos"]]
    model = load(FIXTURES / "tiny-llama").model
    search = BeamSearch(model, rows=4, num_pages=64, page_size=4, max_context=72)
    for name, value in (("length_penalty", 0.5), ("early_stopping", True), ("eos", (254, 255))):
        options = [replace(options_of(case), **{name: value}) for case in cases]
        results = [search.run([case["ids"]], one).results[0] for case, one in zip(cases, options, strict=True)]
        assert np.mean([bool(differences(*pair)) for pair in zip(results, cases, strict=True)]) > 0.25, name

    monkeypatch.setattr("kvjax.engine.beam_loop.extend", wrong_parents)
    search = BeamSearch(model, rows=4, num_pages=64, page_size=4, max_context=72)
    assert all(differences(search.run([case["ids"]], options_of(case)).results[0], case) for case in cases)
