"""Every family and rotary variant against transformers, on tiny random models that it saved."""

import numpy as np
import pytest

from kvjax.models import load
from tests.margins import assert_equal_tokens, compare_tokens
from tests.models.decoding import FIXTURES, greedy, oracle, teacher_forced

NAMES = ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"]


@pytest.mark.parametrize(("name", "kind"), [*((name, "paged") for name in NAMES), ("tiny-llama", "contiguous")])
def test_greedy_tokens_equal_transformers(name, kind):
    runs = oracle(f"{name}/oracle.json")
    tokens = greedy(load(FIXTURES / name).model, [run["ids"] for run in runs], len(runs[0]["tokens"]), kind=kind)
    compared = [compare_tokens(t, run["tokens"], run["margins"]) for t, run in zip(tokens.tolist(), runs, strict=True)]
    assert_equal_tokens(compared, f"{name}, {kind}")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    run = oracle(f"{name}/oracle.json")[-1]
    ids = (run["ids"] + run["tokens"])[:-1]
    logits = teacher_forced(load(FIXTURES / name).model, ids, chunk=19)  # 95 tokens: chunks straddle pages
    error = np.abs(np.asarray(logits) - np.load(FIXTURES / name / "logits.npy")).max()
    print(f"{name}: largest logit difference {error:.1e}")
    assert error < 2e-3


def test_bfloat16_stays_close():
    run = oracle("tiny-llama/oracle.json")[-1]
    ids = (run["ids"] + run["tokens"])[:-1]
    logits = np.asarray(teacher_forced(load(FIXTURES / "tiny-llama", dtype="bfloat16").model, ids, chunk=19))
    expected = np.load(FIXTURES / "tiny-llama" / "logits.npy")
    assert logits.dtype == np.float32
    assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 0.05
