"""Loads a llama-architecture model from one GGUF file, dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from kvjax.models.config import LlamaConfig
from kvjax.models.errors import ModelError
from kvjax.models.gguf_file import GGUFFile, open_gguf
from kvjax.models.gguf_tokenizer import tokenizer_from_gguf
from kvjax.models.llama import LlamaModel
from kvjax.models.loading import LoadedModel, end_tokens
from kvjax.models.rope import Rope, rope_from_config
from kvjax.models.weights import load_parameters

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's module names → GGUF's."""
ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: str | PathLike[str], dtype: str = "float32") -> LoadedModel:
    """Loads a GGUF file of architecture llama: weights as `dtype`, and the tokenizer.

    Raises:
      ModelError: the file is damaged, or says something that this loader does not know.
    """
    file = open_gguf(path)
    config = config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file.path, file.metadata)
    return LoadedModel(
        model=LlamaModel(config, dtype, load_parameters(config, dtype, GGUFCheckpoint(file, config))),
        tokenizer=tokenizer,
        name=file.path.stem,
        eos=_eos(file),
    )


def _eos(file: GGUFFile) -> tuple[int, ...]:
    """The end of a text and, where the file knows one, the end of a turn."""
    found: list[int] = []
    for field in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        if field in file.metadata:
            found += end_tokens(file.path, field, [file.metadata[field]])
    return tuple(dict.fromkeys(found))


class GGUFCheckpoint:
    """A GGUF file's tensors, in Hugging Face's order of rows."""

    def __init__(self, file: GGUFFile, config: LlamaConfig) -> None:
        self.path = file.path
        self._file, self._config = file, config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._file.tensors.items() if name != ROPE_FACTORS}

    def own_name(self, name: str) -> str:
        """`model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
        module, _, ending = name.rpartition(".")
        if not module.startswith("model.layers."):
            return f"{WHOLE[module]}.{ending}"
        layer, module = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{LAYER[module]}.{ending}"

    def read(self, name: str) -> np.ndarray:
        tensor = self._file.read(name)
        if ".attn_q." in name:
            return unpermute(tensor, self._config.heads)
        return unpermute(tensor, self._config.kv_heads) if ".attn_k." in name else tensor


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection from GGUF's order to Hugging Face's.

    llama.cpp rotates neighbouring lanes (2i, 2i + 1), Hugging Face lanes (i, i + head_dim/2); its converter reorders
    the rows of each head accordingly (`LlamaModel.permute` in `convert_hf_to_gguf.py`), and this undoes it.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def config_from_gguf(file: GGUFFile) -> LlamaConfig:
    """The model's shape from the file's metadata and the presence of optional tensors.

    Raises:
      ModelError: another architecture, a missing or wrong field, or a rope scaling other than linear and Llama 3's.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelError(file.path, f"field general.architecture is {architecture!r}; only 'llama' can be read")

    def number(field: str, kind: type[int] | type[float] = int, default: Any = None) -> Any:
        value = file.metadata.get(f"llama.{field}", default)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 2**31:
            wanted = f"a positive {kind.__name__} below 2**31"
            raise ModelError(file.path, f"field llama.{field} is {value!r}; it must be {wanted}")
        return value

    heads, width = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", default=width // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if number(field, default=head_dim) != head_dim:
            raise ModelError(file.path, f"field llama.{field} is {number(field)}; only head_dim={head_dim} can be run")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(file.path, "has no tensor token_embd.weight")
    try:
        return LlamaConfig(
            vocabulary=file.tensors["token_embd.weight"].shape[0],
            width=width,
            mlp_width=number("feed_forward_length"),
            layers=number("block_count"),
            heads=heads,
            kv_heads=number("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            max_context=number("context_length"),
            # Stored as float32; the value people wrote is its shortest decimal form.
            norm_epsilon=float(str(np.float32(number("attention.layer_norm_rms_epsilon", float)))),
            rope=_rope(file, head_dim, number("rope.freq_base", float, default=10_000.0)),
            tied_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(file.path, str(error)) from error


def _rope(file: GGUFFile, head_dim: int, theta: float) -> Rope:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(file.path, f"field llama.rope.scaling.type is {kind!r}; known: none, linear")
    scaling = {"rope_type": "linear", "factor": file.metadata.get("llama.rope.scaling.factor")}
    fields = {"rope_theta": theta, "rope_scaling": scaling if kind == "linear" else None}
    rope = rope_from_config(fields, head_dim, max_context=1)
    if ROPE_FACTORS not in file.tensors:
        return rope
    # Llama 3.1: the converter wrote by how much to divide each frequency.
    factors = file.read(ROPE_FACTORS)
    if factors.shape != (head_dim // 2,):
        raise ModelError(file.path, f"tensor {ROPE_FACTORS} has shape {factors.shape}, not {(head_dim // 2,)}")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(file.path, f"tensor {ROPE_FACTORS} holds values that are no positive numbers")
    return Rope(tuple((np.asarray(rope.frequencies, np.float32) / factors).tolist()), rope.magnitude)
