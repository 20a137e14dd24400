"""`kvjax generate` with samples, drafts and swapping: the same answers at other costs; refusals in one line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvjax import cli
from tests.engine.conftest import compile_once  # noqa: F401  compiled steps are kept here too

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA = str(FIXTURES / "tiny-llama")
PROMPTS = ([5, 9, 5, 9, 5], [17, 3, 3, 40, 41, 42, 8, 8, 1, 2, 3], [7] * 20)
SAMPLED = ("--temperature", "1", "--seed", "11", "--max-new-tokens", "10")


@pytest.fixture
def generate(tmp_path, capsys):
    """Runs `kvjax generate --json` over the prompts; returns exit status, records and complaints."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))

    def run(*flags: str):
        always = ["--model", LLAMA, "--prompts", str(prompts), "--json", "--page-size", "4", "--max-seqs", "3"]
        status = cli.main(["generate", *always, *flags])
        out, err = capsys.readouterr()
        return status, [json.loads(line) for line in out.splitlines()], err.splitlines()

    return run


def tokens(records):
    return [record["token_ids"] for record in records]


def test_samples_are_the_answers_of_consecutive_seeds(generate):
    status, records, errors = generate(*SAMPLED, "--samples", "2")
    assert (status, errors) == (0, [])
    assert [record["prompt_ids"] for record in records] == [ids for ids in PROMPTS for _ in range(2)]
    assert tokens(records)[1::2] == tokens(generate(*SAMPLED, "--seed", "12")[1])
    assert tokens(records)[::2] != tokens(records)[1::2]


def test_drafts_and_swapping_change_no_token(generate):
    """A draft model that is the model itself, prompt lookup, and a pool in which requests give way."""
    plain = tokens(generate("--max-new-tokens", "16")[1])
    for flags in (
        ("--draft", "lookup", "--draft-tokens", "3"),
        ("--draft", LLAMA),
        ("--num-pages", "10", "--burst", "2", "--swap", "1"),
    ):
        status, records, errors = generate("--max-new-tokens", "16", *flags)
        assert (status, errors, tokens(records)) == (0, [], plain), flags


REFUSED = {
    "too many samples": (("--samples", "4"), "--samples 4 run at once; give --max-seqs of at least as many"),
    "seeds past the last": (("--samples", "2", "--seed", str(2**32 - 1)), "2**32"),
    "samples of beams": (("--samples", "2", "--num-beams", "2"), "--samples does not go with --num-beams"),
    "drafts of beams": (("--draft", "lookup", "--num-beams", "2"), "--draft does not go with --num-beams"),
    "no such draft model": (("--draft", "nowhere"), "--draft nowhere: does not exist"),
    "swapping without pages": (("--swap", "1", "--cache", "contiguous"), "this cache has none"),
    "swapping virtual memory": (("--swap", "1", "--cache", "virtual"), "this cache has none"),
    "a draft model on virtual memory": (("--draft", LLAMA, "--cache", "virtual"), "needs PagedBacking"),
    "a draft model without pages": (("--draft", LLAMA, "--cache", "contiguous"), "use kvjax.init"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_line(generate, name):
    flags, problem = REFUSED[name]
    status, records, errors = generate(*flags)
    assert (status, records, len(errors)) == (1, [], 1) and problem in errors[0], errors
