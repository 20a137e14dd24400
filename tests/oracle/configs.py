"""Configurations for the oracle: tiny random models of every family, and the rotary embeddings of real ones.

`initializer_range` is wide so that greedy margins are, too.
"""

from __future__ import annotations

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

COMMON = {
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "initializer_range": 0.35,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}

TINY = {
    "tiny-llama": LlamaConfig(  # GQA 3, head_dim 64, tied, Llama 3.1's rotary embedding
        **COMMON,
        hidden_size=48,
        intermediate_size=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tiny-mistral": MistralConfig(  # GQA 4, head_dim 128, untied, the only one with an end token
        **COMMON | {"eos_token_id": 0},
        hidden_size=24,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        sliding_window=None,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "tiny-qwen2": Qwen2Config(  # GQA 2, biases on Q, K and V, YaRN
        **COMMON,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "tiny-qwen3": Qwen3Config(  # GQA 1, head_dim 80, norms on Q and K, linear rotary scaling
        **COMMON,
        hidden_size=40,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=80,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ),
}

YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072}

ROPE = {
    "default, head_dim 80": {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "linear": {**LONG, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "Llama 3.1": {**LONG, "rope_parameters": {**LLAMA3, "factor": 8.0}},
    "Llama 3.2, head_dim 64": {**LONG, "head_dim": 64, "rope_parameters": {**LLAMA3, "factor": 32.0}},
    "Qwen 2.5 with YaRN": {**LONG, "rope_parameters": YARN},
    "YaRN, two mscales and a ramp not truncated": {
        **LONG,
        "rope_parameters": {
            **YARN,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    },
    "YaRN, attention_factor": {**LONG, "rope_parameters": {**YARN, "attention_factor": 1.25}},
}
