"""Hugging Face configs: what the families differ in, and what is refused."""

import json

import pytest

from kvjax.models.config import LlamaConfig
from tests.models.decoding import FIXTURES

LLAMA = json.loads((FIXTURES / "tiny-llama" / "config.json").read_text())
MISTRAL = json.loads((FIXTURES / "tiny-mistral" / "config.json").read_text())
QWEN2 = json.loads((FIXTURES / "tiny-qwen2" / "config.json").read_text())
QWEN3 = json.loads((FIXTURES / "tiny-qwen3" / "config.json").read_text())


def without(config: dict, field: str) -> dict:
    return {name: value for name, value in config.items() if name != field}


def test_families_differ_in_biases_and_norms():
    flags = ("qkv_bias", "output_bias", "mlp_bias", "query_key_norm")

    def read(config: dict) -> tuple[bool, ...]:
        return tuple(getattr(LlamaConfig.from_huggingface(config), flag) for flag in flags)

    biased = {"attention_bias": True, "mlp_bias": True}
    assert read(LLAMA) == (False, False, False, False)
    assert read({**LLAMA, **biased}) == (True, True, True, False)
    assert read({**MISTRAL, **biased}) == (False, False, False, False)  # transformers ignores both there
    assert read(QWEN2) == (True, False, False, False)
    assert read({**QWEN3, **biased}) == (True, True, False, True)


def test_head_dim_need_not_divide_the_width():
    config = LlamaConfig.from_huggingface(QWEN3)
    assert (config.width, config.heads, config.head_dim) == (40, 2, 80)
    assert config.cache_spec("float32").bytes_per_token == 2 * 2 * 2 * 80 * 4  # layers, k and v, heads, dim, float32


def test_a_llama_without_kv_heads_has_as_many_as_heads():
    assert LlamaConfig.from_huggingface(without(LLAMA, "num_key_value_heads")).kv_heads == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "gpt2"}, "model_type='gpt2' is not supported; known: llama"),
        (without(LLAMA, "model_type"), "model_type=None"),
        (without(LLAMA, "vocab_size"), "'vocab_size'"),
        (without(LLAMA, "hidden_size"), "'hidden_size'"),
        (without(LLAMA, "intermediate_size"), "'intermediate_size'"),
        (without(LLAMA, "num_hidden_layers"), "'num_hidden_layers'"),
        (without(LLAMA, "num_attention_heads"), "'num_attention_heads'"),
        (without(LLAMA, "max_position_embeddings"), "'max_position_embeddings'"),
        (without(LLAMA, "rms_norm_eps"), "'rms_norm_eps' is None"),
        ({**LLAMA, "vocab_size": 0}, "'vocab_size'=0"),
        ({**LLAMA, "hidden_size": "48"}, "'hidden_size'='48'"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({**LLAMA, "tie_word_embeddings": 1}, "'tie_word_embeddings' is 1"),
        ({**LLAMA, "num_key_value_heads": 2}, "heads=3 must be a multiple of kv_heads=2"),
        (without(MISTRAL, "num_key_value_heads"), "'num_key_value_heads'"),
        (without(MISTRAL, "sliding_window"), "'sliding_window'"),
        ({**MISTRAL, "sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({**QWEN2, "sliding_window": 4096, "use_sliding_window": True}, "sliding_window=4096 is not supported"),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        (without(QWEN3, "head_dim"), "'head_dim'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(config, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_huggingface(config)
