"""The shape of a Llama-family model, and how Hugging Face's `config.json` says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvjax.architecture import config_integer
from kvjax.models.rope import Rope, rope_from_config
from kvjax.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A decoder of RMSNorm, rotary grouped-query attention and gated SiLU MLPs.

    Attributes:
      vocabulary: number of token ids.
      width: elements of a hidden state.
      mlp_width: elements inside the MLP.
      layers, heads, kv_heads, head_dim: of the attention; heads · head_dim may differ from width.
      max_context: positions the model was trained for.
      norm_epsilon: added to the mean square in every RMSNorm.
      rope: the rotary embedding.
      tied_embeddings: logits use the token embedding; otherwise a matrix of their own.
      qkv_bias, output_bias, mlp_bias: whether these projections add a bias.
      query_key_norm: RMSNorm over each head's query and key before they are rotated (Qwen3).
    """

    vocabulary: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False

    def __post_init__(self) -> None:
        self.cache_spec("float32")  # refuses layers, heads and widths that no cache has
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if len(self.rope.frequencies) * 2 != self.head_dim:
            raise ValueError(f"rope has {len(self.rope.frequencies)} frequencies; head_dim={self.head_dim} needs half")

    def cache_spec(self, dtype: str) -> CacheSpec:
        """What the model caches when its keys and values are `dtype`."""
        return CacheSpec.uniform(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype)

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """The config of a Hugging Face `config.json` of model_type llama, mistral, qwen2 or qwen3.

        A field is taken to have a default only where it has one in transformers that does not depend on the family.

        Raises:
          ValueError: an unknown family or variant, or a missing or wrong field; the message names it.
        """
        spec = CacheSpec.from_config(config)  # refuses unknown families and sliding windows
        family = config["model_type"]
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config hidden_act={config['hidden_act']!r} is not supported; only 'silu' is")
        epsilon = config.get("rms_norm_eps")
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            raise ValueError(f"config field 'rms_norm_eps' is {epsilon!r}; it must be a number between 0 and 1")
        heads, keys = config_integer(config, "num_attention_heads"), spec.groups[0].tensor("k")
        max_context = config_integer(config, "max_position_embeddings")
        bias = family in ("llama", "qwen3") and _flag(config, "attention_bias")
        return cls(
            vocabulary=config_integer(config, "vocab_size"),
            width=config_integer(config, "hidden_size"),
            mlp_width=config_integer(config, "intermediate_size"),
            layers=spec.num_layers,
            heads=heads,
            kv_heads=keys.heads,
            head_dim=keys.width,
            max_context=max_context,
            norm_epsilon=epsilon,
            rope=rope_from_config(config, keys.width, max_context),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",
            output_bias=bias,
            mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
            query_key_norm=family == "qwen3",
        )


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise ValueError(f"config field {field!r} is {value!r}; it must be true or false")
    return value
