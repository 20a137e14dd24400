"""Which reader knows which `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvjax.architecture import recurrent, weights
from kvjax.architecture.attention import attention_reader
from kvjax.architecture.compressed import read_compressed
from kvjax.architecture.description import Architecture
from kvjax.architecture.fields import ConfigError, Fields, FieldUse
from kvjax.architecture.latent import latent_reader
from kvjax.architecture.windows import chunks, one_window, stated_window, window_from_layer, window_pattern

Reader = Callable[[Fields], Architecture]

GEMMA_3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
"""What Gemma 3's published files leave out: transformers' defaults of `Gemma3TextConfig`."""
DSA = latent_reader(indexer=True)
READERS: Mapping[str, Reader] = {
    "llama": attention_reader(kv_heads="heads", counter=weights.dense()),
    "mistral": attention_reader(windows=stated_window, counter=weights.dense(qkv_bias=False, output_bias=False)),
    "mixtral": attention_reader(windows=one_window, counter=weights.mixture()),
    "qwen2": attention_reader(windows=window_from_layer, counter=weights.dense(qkv_bias=True, output_bias=False)),
    "qwen3": attention_reader(
        windows=window_from_layer, head_dim="required", counter=weights.dense(query_key_norm=True)
    ),
    "qwen3_moe": attention_reader(
        windows=window_from_layer,
        head_dim="required",
        counter=weights.mixture(inner="moe_intermediate_size", number="num_experts", query_key_norm="head"),
    ),
    "gemma": attention_reader(head_dim="required", counter=weights.dense(tied=True)),
    "gemma2": attention_reader(
        windows=partial(window_pattern, every=2),
        head_dim="required",
        counter=weights.dense(norms=4, tied=True),
        skip=("sliding_window_size",),
    ),
    "gemma3_text": attention_reader(
        windows=partial(window_pattern, every=6, settable=True),
        head_dim="required",
        defaults=GEMMA_3,
        counter=weights.dense(norms=4, query_key_norm=True, tied=True),
        skip=("_sliding_window_pattern",),
    ),
    "phi": attention_reader(kv_heads="heads", counter=weights.phi),
    "phi3": attention_reader(windows=one_window, kv_heads="heads", counter=weights.dense()),
    "phimoe": attention_reader(windows=one_window),
    "glm": attention_reader(counter=weights.dense(qkv_bias="attention_bias", output_bias=False)),
    "glm4": attention_reader(counter=weights.dense(qkv_bias="attention_bias", output_bias=False, norms=4)),
    "glm4_moe": attention_reader(head_dim="required", counter=weights.glm4_moe),
    "minimax_m2": attention_reader(
        head_dim="required",
        counter=weights.mixture(query_key_norm="all", router_bias=True),
        skip=("attn_type_list", "attn_window_size"),
    ),
    "gpt_oss": attention_reader(
        windows=partial(window_pattern, every=2),
        head_dim="required",
        counter=weights.mixture(bias=True, sinks=True),
        skip=("initial_context_length",),
    ),
    "llama4_text": attention_reader(windows=chunks, chunked=True, head_dim="required", counter=weights.llama4),
    "opt": attention_reader(kv_heads="heads", counter=weights.opt),
    "deepseek_v2": latent_reader(router_bias=False),
    "deepseek_v3": latent_reader(),
    "kimi_k2": latent_reader(),
    "deepseek_v32": DSA,
    "glm_moe_dsa": DSA,
    "deepseek_v4": read_compressed,
    "kimi_linear": recurrent.read_kimi_linear,
    "qwen3_next": recurrent.read_qwen3_next,
    "minimax": recurrent.read_minimax,
    "mamba2": recurrent.read_mamba2,
    "jamba": recurrent.read_jamba,
    "bamba": recurrent.mamba2_hybrid(recurrent.bamba_kinds),
    "granitemoehybrid": recurrent.mamba2_hybrid(recurrent.granite_kinds),
    "falcon_h1": recurrent.mamba2_hybrid(recurrent.falcon_kinds),
    "nemotron_h": recurrent.read_nemotron_h,
}
ALIASES = {"minimax_text_01": "minimax", "minimax_m1": "minimax"}
"""Names that checkpoints use for a family that transformers calls otherwise."""
WITH_TEXT_CONFIG = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_linear",
}
"""Models of text and images: their decoder is described in `text_config`, by default of this model_type."""
MODEL_TYPES = (*READERS, *ALIASES, *WITH_TEXT_CONFIG)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """What the model of a Hugging Face `config.json` caches.

    Args:
      config: the file's object.  Missing fields take a default only where the family has one that published files rely
        on; `Architecture.uses` says which.

    Raises:
      ConfigError: an unknown `model_type`, a missing or wrong field, or an unknown field whose name says that it may
        change what is cached (`fields.CACHE_RELEVANT`).
    """
    if not isinstance(config, Mapping):
        raise ConfigError("model_type", f"a config must be an object, not {type(config).__name__}")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ConfigError("model_type", f"config model_type={family!r} is not supported; known: {known}")
    fields = Fields(config, family)
    fields.uses.append(FieldUse("model_type", family, "family", given=True))
    if family in WITH_TEXT_CONFIG:
        fields.skip("vision_config")  # Encoders cache nothing from one step to the next.
        text = fields.section("text_config")
        inner = text.raw("model_type", "family of the decoder", WITH_TEXT_CONFIG[family])
        if not isinstance(inner, str) or inner not in READERS:
            raise ConfigError("text_config", f"config text_config.model_type={inner!r} is not supported for {family}")
        text.family = inner
        result = READERS[inner](text)
    else:
        result = READERS[ALIASES.get(family, family)](fields)
    fields.finish()
    return replace(result, model_type=family, uses=_merged(fields.uses))


def _merged(uses: Sequence[FieldUse]) -> tuple[FieldUse, ...]:
    """One entry a field, with all it was used for."""
    purposes: dict[str, dict[str, None]] = {}
    for use in uses:
        purposes.setdefault(use.field, {})[use.use] = None
    firsts = {use.field: use for use in reversed(uses)}
    return tuple(replace(firsts[field], use=", ".join(filter(None, purposes[field]))) for field in purposes)
