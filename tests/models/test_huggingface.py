"""Hugging Face directories: whole, split into shards, stored in other dtypes, and damaged."""

import json
import os
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.models import ModelError, load
from tests.models.decoding import FIXTURES

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of the untied model, to be damaged."""
    return Path(shutil.copytree(FIXTURES / "tiny-mistral", tmp_path / "model"))


def edit(directory: Path, **tensors) -> dict:
    """Rewrites the weights with some replaced, or removed where None is given; keys are names with _ for the dots."""
    weights = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, directory / "model.safetensors")
    return weights


def edit_config(directory: Path, name: str = "config.json", **fields) -> None:
    config = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps({**config, **fields}))


def same_parameters(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one.model.parameters, other.model.parameters))


def test_what_came_with_it():
    loaded = load(FIXTURES / "tiny-mistral")
    assert (loaded.name, loaded.tokenizer, loaded.eos) == ("tiny-mistral", None, (0,))
    assert load(FIXTURES / "tiny-llama").eos == ()
    assert (loaded.model.vocabulary, loaded.model.max_context) == (256, 128)
    assert loaded.model.spec.num_layers == 2


def test_end_tokens_may_be_a_list_and_generation_config_goes_first(directory):
    edit_config(directory, "generation_config.json", eos_token_id=[7, 9])
    assert load(directory).eos == (7, 9)
    (directory / "generation_config.json").unlink()
    assert load(directory).eos == (0,)
    edit_config(directory, eos_token_id="</s>")
    with pytest.raises(ModelError, match=r"config.json: field eos_token_id holds '</s>'"):
        load(directory)


def test_shards_are_joined(directory):
    whole = load(directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(weights.items()):
        halves["ab"[index % 2] + ".safetensors"][name] = tensor
    for file, half in halves.items():
        save_file(half, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, half in halves.items() for name in half}}))
    assert same_parameters(load(directory), whole)
    (directory / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b.safetensors: cannot be read"):
        load(directory)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index.json: field weight_map"):
        load(directory)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_stored_in_16_bits_become_what_is_asked(directory, dtype):
    edit(directory, **{name: t.astype(dtype) for name, t in load_file(directory / "model.safetensors").items()})
    leaves = jax.tree.leaves(load(directory).model.parameters)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert same_parameters(load(directory, dtype=np.dtype(dtype).name), load(directory))


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.int32])
def test_weights_stored_as_what_means_little_without_its_scales_are_refused(directory, dtype):
    """An int8 tensor of the right shape would otherwise load as if its integers were the weights."""
    edit(directory, **{Q_PROJ: np.ones((512, 24), dtype)})
    with pytest.raises(ModelError, match=rf"model.safetensors: tensor {Q_PROJ} has dtype \w+, not supported"):
        load(directory)


def test_tied_embeddings_ignore_a_stored_copy(directory):
    edit_config(directory, tie_word_embeddings=True)
    assert "lm_head" not in load(directory).model.parameters


@pytest.mark.parametrize("keep", [0, 5, 100, 5_000, -4])
def test_truncated_weights(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read as safetensors \("):
        load(directory)


def test_a_missing_tensor(directory):
    edit(directory, **{Q_PROJ: None, "lm_head.weight": None})
    with pytest.raises(ModelError, match=r"model: has no tensor lm_head.weight \(and 1 more\)"):
        load(directory)


def test_a_tensor_of_another_shape(directory):
    edit(directory, **{Q_PROJ: np.zeros((512, 25), np.float32)})
    with pytest.raises(ModelError, match=rf"tensor {Q_PROJ} has shape \(512, 25\); the config asks \(512, 24\)"):
        load(directory)


def test_a_tensor_that_would_not_be_used(directory):
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit(directory, **{bias: np.zeros(512, np.float32)})
    with pytest.raises(ModelError, match=rf"would not use: {bias}"):
        load(directory)


def test_nothing_is_read_before_everything_is_checked(directory, monkeypatch):
    edit(directory, **{"model.norm.weight": None})
    monkeypatch.setattr(
        "kvjax.models.huggingface.SafetensorsCheckpoint.read", lambda *_: pytest.fail("a tensor was read")
    )
    with pytest.raises(ModelError, match=r"model.norm.weight"):
        load(directory)


def test_no_weights_and_no_config(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json: cannot be read \(No such file"):
        load(directory)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "holds a JSON list"), ('{"model_type": "llama"}', "'num_attention_heads'")],
)
def test_a_bad_config_names_the_file_and_the_field(directory, text, message):
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=f"config.json: .*{message}"):
        load(directory)


def test_an_unknown_path_and_an_unknown_dtype(tmp_path):
    with pytest.raises(ModelError, match="nowhere: does not exist; give 'smollm2'"):
        load(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="pipe: is neither a file nor a directory"):
        load(tmp_path / "pipe")
    with pytest.raises(ValueError, match="dtype='int4' is not supported"):
        load(FIXTURES / "tiny-llama", dtype="int4")
