"""Writes GGUF files for tests, as llama.cpp's converter would write the models of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

TOKENIZER = {
    "model": "gpt2",
    "pre": "smollm",
    "tokens": ["<|end|>", "<tool>", "a", "b", "ab", "Ġ", "Ġab", "1"],
    "token_type": [3, 4, 1, 1, 1, 1, 1, 1],
    "merges": ["a b", "Ġ ab"],
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def permute(weights: np.ndarray, n_head: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to Q and K, word for word."""
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def convert(
    directory: Path,
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
    skip: str = "",
) -> None:
    """Writes a llama directory as GGUF; `metadata` overrides fields (None leaves one out), `skip` a tensor."""
    config = json.loads((directory / "config.json").read_text())
    fields = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "llama.rope.dimension_count": config["head_dim"],
        **{f"tokenizer.ggml.{name}": value for name, value in TOKENIZER.items()},
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch=fields.pop("general.architecture"))
    for name, value in fields.items():
        if value is not None:
            _add(writer, name, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "q_proj" in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if "k_proj" in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        if name != skip:
            writer.add_tensor(_rename(name), tensor)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(name, value)


def _rename(name: str) -> str:
    module, _, ending = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, module = module.split(".", 3)
        return f"blk.{layer}.{NAMES[module]}.{ending}"
    return f"{NAMES[module]}.{ending}"
