"""`kvjax generate` gives the greedy tokens of Hugging Face transformers, prompt by prompt.

The expected tokens were recorded by tests/oracle/make_fixtures.py with transformers in float32 on a CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.margins import assert_equal_tokens, compare_tokens

FIXTURES = Path(__file__).parent / "fixtures"


def generate(tmp_path: Path, model: str | Path, prompts: list[dict], tokens: int, *flags: str) -> list[dict]:
    """Answers prompts through the command line, in a process of its own."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    command = [sys.executable, "-m", "kvjax.cli", "generate", "--model", str(model), "--prompts", str(file)]
    command += ["--max-new-tokens", str(tokens), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(records: list[dict], runs: list[dict], what: str) -> None:
    """Equal up to where a run met its end token; the recorded runs went on after theirs."""
    assert len(records) == len(runs)
    comparisons = []
    for record, run in zip(records, runs, strict=True):
        assert record["prompt_ids"] == run["ids"]
        number = len(record["token_ids"])
        assert record["finish_reason"] == "stop" or number == len(run["tokens"])
        comparisons.append(compare_tokens(record["token_ids"], run["tokens"][:number], run["margins"][:number]))
    assert_equal_tokens(comparisons, what)


def test_smollm2_for_24_prompts_and_64_tokens(tmp_path):
    """Text in, with a pool so tight that requests are preempted and computed again."""
    runs = json.loads((FIXTURES / "smollm2_greedy.json").read_text())["prompts"]
    assert len(runs) >= 20 and all(len(run["tokens"]) == 64 for run in runs)
    records = generate(tmp_path, "smollm2", [{"prompt": run["text"]} for run in runs], 64, "--num-pages", "70")
    assert sum(len(record["token_ids"]) for record in records) > 1200
    compare(records, runs, "SmolLM2")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_tiny_models_saved_by_transformers(tmp_path, name):
    """Ids in, from directories without a tokenizer: GQA ratios 1 to 4, head dimensions 16 to 128."""
    runs = json.loads((FIXTURES / name / "oracle.json").read_text())["prompts"]
    prompts = [{"prompt_ids": run["ids"]} for run in runs]
    records = generate(tmp_path, FIXTURES / name, prompts, len(runs[0]["tokens"]), "--page-size", "4", "--chunk", "8")
    compare(records, runs, name)
