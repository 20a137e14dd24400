"""GGUF files: a converted model is the same model; damaged and unknown files are refused with a reason."""

import json
import shutil

import gguf
import jax
import numpy as np
import pytest

from kvjax.models import ModelError, load
from kvjax.models.gguf_file import open_gguf
from tests.models.decoding import FIXTURES, teacher_forced
from tests.models.gguf_files import convert

F16, Q8_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F16", "Q8_0", "Q4_1"))
LLAMA = FIXTURES / "tiny-llama"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """tiny-llama with the default rotary embedding, whose GGUF needs no factors: (directory, file)."""
    directory = tmp_path_factory.mktemp("plain") / "llama"
    shutil.copytree(LLAMA, directory)
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    (directory / "config.json").write_text(json.dumps(config))
    convert(directory, directory.with_suffix(".gguf"))
    return directory, directory.with_suffix(".gguf")


def parameters_equal(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one.model.parameters, other.model.parameters))


def test_a_converted_model_is_the_same_model(plain):
    directory, file = plain
    one, other = load(directory), load(file)
    assert one.model.config == other.model.config
    assert parameters_equal(one, other)


def test_without_the_unpermutation_it_is_another_model(plain, monkeypatch):
    """The gate above sees Q and K rows that were left in llama.cpp's order."""
    directory, file = plain
    monkeypatch.setattr("kvjax.models.gguf.unpermute", lambda rows, heads: rows)
    broken = load(file)
    assert not parameters_equal(load(directory), broken)
    ids = list(range(1, 17))
    difference = teacher_forced(broken.model, ids, chunk=16) - teacher_forced(load(directory).model, ids, chunk=16)
    assert np.abs(difference).max() > 0.1


def test_llama3_factors_become_the_rope_of_the_config(tmp_path):
    expected = load(LLAMA).model.config.rope
    default = 1 / np.float32(10000) ** (np.arange(0, 64, 2, dtype=np.float32) / 64)
    factors = (default / np.asarray(expected.frequencies, np.float32)).astype(np.float32)
    convert(LLAMA, tmp_path / "m.gguf", rope_factors=factors)
    np.testing.assert_allclose(load(tmp_path / "m.gguf").model.config.rope.frequencies, expected.frequencies, rtol=3e-7)


@pytest.mark.parametrize(("kind", "tolerance"), [(F16, 1e-3), (Q8_0, 2e-2), (Q4_1, 0.2)])
def test_quantised_tensors_come_near(tmp_path, kind, tolerance):
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", arch="llama")
    writer.add_tensor("x", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = open_gguf(tmp_path / "q.gguf").read("x")
    assert read.dtype == np.float32
    assert np.abs(read - values).max() < tolerance


def test_every_truncation_is_noticed(plain, tmp_path):
    content = plain[1].read_bytes()
    for keep in [*range(0, 200, 7), *range(200, len(content), 9973), len(content) - 1]:
        (tmp_path / "cut.gguf").write_bytes(content[:keep])
        with pytest.raises(ModelError, match=r"cut.gguf: (is truncated|cannot be read|is not a GGUF file)"):
            load(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "general.architecture is 'gemma'"),
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"llama.context_length": 0}, "llama.context_length is 0"),
        ({"llama.embedding_length": "48"}, "llama.embedding_length is '48'"),
        ({"llama.attention.head_count_kv": 2}, "heads=3 must be a multiple of kv_heads=2"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon is None"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count is 32"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "'factor' is None"),
        ({"llama.feed_forward_length": 32}, r"blk.0.ffn_down.weight has shape \(48, 64\); the config asks \(48, 32\)"),
        ({"llama.block_count": 3}, r"has no tensor blk.2.attn_k.weight \(and 8 more\)"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; only 'gpt2'"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre is 'viking'; known: gpt-2, smollm, llama-bpe"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 8 tokens"),
        ({"tokenizer.ggml.merges": ["a z"]}, "tokenizer.ggml.merges does not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": 8}, "tokenizer.ggml.eos_token_id is 8, and there are 8 tokens"),
        ({"tokenizer.ggml.eos_token_id": True}, "tokenizer.ggml.eos_token_id is a bool, not a int"),
        ({"tokenizer.ggml.eot_token_id": "end"}, "tokenizer.ggml.eot_token_id holds 'end'"),
        ({"tokenizer.ggml.eot_token_id": 2**31}, "tokenizer.ggml.eot_token_id holds 2147483648"),
        ({"tokenizer.ggml.tokens": [1] * 8}, "tokenizer.ggml.tokens holds 1, which is no text"),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges holds 1, which is no text"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is a int, not a str"),
        ({"llama.block_count": 2**32 - 1}, "llama.block_count is 4294967295; it must be a positive int below"),
        ({"llama.block_count": 2**31 - 1}, "layers=2147483647 must be at most 65536"),
        ({"llama.context_length": 2**31}, "llama.context_length is 2147483648"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "llama.attention.layer_norm_rms_epsilon is nan"),
        ({"llama.rope.freq_base": float("inf")}, "llama.rope.freq_base is inf"),
    ],
)
def test_what_is_missing_or_wrong_is_named(plain, tmp_path, metadata, message):
    convert(plain[0], tmp_path / "bad.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=f"bad.gguf: .*{message}"):
        load(tmp_path / "bad.gguf")


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_rope_factors_that_are_no_numbers(tmp_path, factor):
    convert(LLAMA, tmp_path / "bad.gguf", rope_factors=np.full(32, factor, np.float32))
    with pytest.raises(ModelError, match=r"bad.gguf: tensor rope_freqs.weight holds values that are no positive"):
        load(tmp_path / "bad.gguf")


def test_the_name_of_a_model_is_that_of_its_file(plain, tmp_path):
    convert(plain[0], tmp_path / "given.gguf", metadata={"general.name": "Internal 8k Mix1 Ep2"})
    assert load(tmp_path / "given.gguf").name == "given"


def test_a_missing_tensor_is_named(plain, tmp_path):
    convert(plain[0], tmp_path / "bad.gguf", skip="model.embed_tokens.weight")
    with pytest.raises(ModelError, match=r"bad.gguf: has no tensor token_embd.weight"):
        load(tmp_path / "bad.gguf")


def test_another_kind_of_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match=r"x.gguf: is not a GGUF file"):
        load(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match=r"x.gguf: has GGUF version 9"):
        load(tmp_path / "x.gguf")
