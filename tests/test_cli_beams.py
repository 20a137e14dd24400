"""`kvjax generate --num-beams`: the oracle's sequences and scores in JSON lines, refusals in one line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax import cli

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA = ["generate", "--model", str(FIXTURES / "tiny-llama"), "--page-size", "4"]


def oracle_case() -> dict:
    """A search with an option of every kind set, and no end token, as the model has none."""
    cases = json.loads((FIXTURES / "beams_tiny.json").read_text())["cases"]
    return next(
        case
        for case in cases
        if case["options"]["eos"] == []
        and (case["options"]["length_penalty"], case["options"]["early_stopping"]) == (2.0, "never")
    )


def test_json_lines_hold_the_oracles_sequences_and_a_tight_pool_only_delays(tmp_path, capsys):
    """Two prompts out of a pool that holds the beams of one; a line that is no prompt; one that can never fit."""
    case = oracle_case()
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": case["ids"]}, {"nothing": 1}, {"prompt_ids": case["ids"]}, {"prompt_ids": [1] * 120}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    number = case["options"]["num_return_sequences"]
    flags = ["--prompts", str(prompts), "--json", "--num-beams", "4", "--length-penalty", "2"]
    flags += ["--early-stopping", "never", "--num-return-sequences", str(number), "--max-new-tokens", "20"]
    assert cli.main([*LLAMA, *flags, "--num-pages", "32"]) == 1

    output = capsys.readouterr()
    records = [json.loads(line) for line in output.out.splitlines()]
    assert [record["finish_reason"] for record in records] == ["length", "error", "length", "error"]
    for record in (records[0], records[2]):
        assert [one["token_ids"] for one in record["sequences"]] == case["sequences"]
        assert [one["score"] for one in record["sequences"]] == pytest.approx(case["scores"], abs=1e-3)
        assert record["token_ids"] == case["sequences"][0]
    assert records[1]["sequences"] == records[3]["sequences"] == []
    assert "positions of a row" in records[3]["error"]
    assert len(output.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0.5"], "--temperature does not go with --num-beams"),
        (["--stop", "x"], "--stop"),
        (["--seed", "3"], "--seed"),
        (["--samples", "2"], "--samples"),
        (["--num-beams", "1", "--length-penalty", "2"], "--length-penalty needs --num-beams"),
        (["--cache", "contiguous"], "--cache contiguous"),
        (["--cache", "virtual"], "--cache virtual"),
        (["--num-return-sequences", "5"], "num_return_sequences=5"),
        (["--length-penalty", "1e9"], "length_penalty=1000000000.0"),
        (["--num-beams", "200"], "200 beams"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys, flags, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 2, 3]}\n')
    assert cli.main([*LLAMA, "--prompts", str(prompts), "--num-beams", "4", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("flags", [["--length-penalty", "nan"], ["--num-beams", "0"], ["--early-stopping", "maybe"]])
def test_values_that_are_none_are_bad_usage(capsys, flags):
    assert cli.main([*LLAMA, "--prompt", "x", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
