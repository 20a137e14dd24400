"""A GGUF file's metadata, said in the fields of Hugging Face's config.json, so that one set of readers knows both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.architecture.fields import ConfigError

COMMON = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""GGUF key, without the architecture's prefix → config field."""
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt-oss": "gpt_oss",
    "glm4": "glm4",
    "deepseek2": "deepseek_v3",
}
"""general.architecture → model_type."""
INERT = (
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.value_length",
    "attention.causal",
    "attn_logit_softcapping",
    "attention.scale",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.temperature_length",
)
"""Keys of attention that change no size, or are checked here."""


def config_of_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config that `read_architecture` takes.

    Args:
      metadata: a GGUF file's key-value pairs.

    Raises:
      ConfigError: an architecture without a reader, keys and values of different widths, layers that differ in heads,
        or an unknown key of attention or state.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            "general.architecture", f"GGUF general.architecture={architecture!r} is not supported; known: {known}"
        )
    config: dict[str, Any] = {"model_type": FAMILIES[architecture]}
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in INERT or name.startswith("rope."):
            continue
        if name in COMMON:
            config[COMMON[name]] = _scalar(key, value)
        elif name.startswith(("attention.", "ssm.", "attn")):
            raise ConfigError(key, f"GGUF key {key}={value!r} is not known, and may change what is cached")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise ConfigError("tokenizer.ggml.tokens", f"GGUF key tokenizer.ggml.tokens={tokens!r} must be a list")
    if tokens:
        config.setdefault("vocab_size", len(tokens))
    if architecture == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    if "kv_lora_rank" in config:
        # llama.cpp's latent files give the width of what it caches: latent and rotated key.
        config["qk_rope_head_dim"] = metadata.get(f"{architecture}.rope.dimension_count")
        config.pop("head_dim", None)
    else:
        _check_value_width(metadata, architecture)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if config["model_type"] in ("qwen2", "qwen3"):
        config["use_sliding_window"] = config.get("sliding_window") is not None
    return config


def _scalar(key: str, value: Any) -> Any:
    """A number that holds for every layer; a list of equal numbers is one."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ConfigError(key, f"GGUF key {key} differs between layers ({sorted(set(value))}), which is not supported")
    return value[0]


def _check_value_width(metadata: Mapping[str, Any], architecture: str) -> None:
    key, value = (metadata.get(f"{architecture}.attention.{one}_length") for one in ("key", "value"))
    if key != value:
        name = f"{architecture}.attention.value_length"
        raise ConfigError(name, f"GGUF key {name}={value!r} differs from key_length={key!r}, which is not supported")
