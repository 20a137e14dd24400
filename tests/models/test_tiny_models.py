"""Every family and rotary variant against transformers, on tiny random models that it saved."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import load
from kvjax.models.rope import rope_from_config
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


def other_rope(model):
    default = rope_from_config({"rope_theta": 10000.0}, model.config.head_dim, 128)
    return replace(model, config=replace(model.config, rope=default))


def no_bias(model):
    def strip(path, leaf):
        return jnp.zeros_like(leaf) if "bias" in jax.tree_util.keystr(path) else leaf

    return replace(model, parameters=jax.tree.map_with_path(strip, model.parameters))


def no_query_norm(model):
    def strip(path, leaf):
        return jnp.ones_like(leaf) if "q_norm" in jax.tree_util.keystr(path) else leaf

    return replace(model, parameters=jax.tree.map_with_path(strip, model.parameters))


@pytest.mark.parametrize(
    ("name", "broken"), [("tiny-llama", other_rope), ("tiny-qwen2", no_bias), ("tiny-qwen3", no_query_norm)]
)
def test_a_model_that_misses_one_thing_is_noticed(name, broken):
    run = oracle(f"{name}/oracle.json")[-1]
    logits = teacher_forced(broken(load(FIXTURES / name).model), run["ids"][:38], chunk=19)
    assert np.abs(np.asarray(logits) - np.load(FIXTURES / name / "logits.npy")[:38]).max() > 0.1


def test_bfloat16_stays_close():
    run = oracle("tiny-llama/oracle.json")[-1]
    ids = (run["ids"] + run["tokens"])[:-1]
    logits = np.asarray(teacher_forced(load(FIXTURES / "tiny-llama", dtype="bfloat16").model, ids, chunk=19))
    expected = np.load(FIXTURES / "tiny-llama" / "logits.npy")
    assert logits.dtype == np.float32
    assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 0.05
