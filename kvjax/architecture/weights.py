"""Counts a model's weights from its config: matrices, biases and norms, exactly.

Written for the families whose publishers' own totals it reproduces; the others say that they are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvjax.architecture.fields import ConfigError, Fields

USE = "counting weights"


@dataclass(frozen=True, slots=True)
class Shape:
    """What attention and MLPs of every layer share."""

    layers: int
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0


Counter = Callable[[Fields, Shape], int]


def count(fields: Fields, shape: Shape, counter: Counter | None) -> tuple[int | None, str]:
    """(number of weights, how they were counted), or (None, why they were not)."""
    if counter is None:
        return None, f"the weights of {fields.family} are not counted by this version"
    try:
        return counter(fields, shape), "every matrix, bias and norm of the config, vision and MTP parts left out"
    except ConfigError as error:
        return None, str(error)


def dense(
    *,
    norms: int = 2,
    qkv_bias: bool | str = "attention_bias",
    output_bias: bool | str = "attention_bias",
    query_key_norm: bool = False,
    tied: bool = False,
) -> Counter:
    """Gated MLPs and RMSNorms: Llama, Mistral, Qwen, Gemma, Phi-3, GLM-4.  A bias can be a field's name."""

    def counter(fields: Fields, shape: Shape) -> int:
        inner = fields.integer("intermediate_size", USE)
        mlp = 3 * shape.hidden * inner
        if fields.flag("mlp_bias", USE):
            mlp += 2 * inner + shape.hidden
        layer = attention(fields, shape, qkv_bias, output_bias, query_key_norm) + mlp + norms * shape.hidden
        return embeddings(fields, shape.hidden, tied) + shape.layers * layer + shape.hidden

    return counter


def mixture(
    *,
    inner: str = "intermediate_size",
    number: str = "num_local_experts",
    query_key_norm: str | None = None,
    bias: bool = False,
    sinks: bool = False,
    router_bias: bool = False,
) -> Counter:
    """Gated experts in every layer: Mixtral, Qwen3-MoE, gpt-oss (with biases and sinks), MiniMax-M2.

    `query_key_norm` is None, "head" (one head's width) or "all" (the width of all heads).
    """

    def counter(fields: Fields, shape: Shape) -> int:
        hidden, width = shape.hidden, fields.integer(inner, USE)
        experts = fields.integer(number, USE)
        layer = attention(fields, shape, bias or "attention_bias", bias or "attention_bias", query_key_norm == "head")
        if query_key_norm == "all":
            layer += (shape.heads + shape.kv_heads) * shape.head_dim
        layer += experts * (3 * hidden * width + (2 * width + hidden if bias else 0))  # experts
        layer += experts * (hidden + (1 if bias or router_bias else 0))  # router
        layer += 2 * hidden + (shape.heads if sinks else 0)
        return embeddings(fields, hidden) + shape.layers * layer + hidden

    return counter


def llama4(fields: Fields, shape: Shape) -> int:
    """Llama 4: one shared and many routed experts in some layers, a wider dense MLP in the others."""
    hidden, width = shape.hidden, fields.integer("intermediate_size", USE)
    experts = fields.integer("num_local_experts", USE)
    every = fields.integer("interleave_moe_layer_step", USE, 1)
    routed = len(fields.integers("moe_layers", USE) or range(every - 1, shape.layers, every))
    moe = 3 * hidden * width * (experts + 1) + experts * hidden
    mlps = routed * moe + (shape.layers - routed) * 3 * hidden * fields.integer("intermediate_size_mlp", USE)
    layer = attention(fields, shape, "attention_bias", "attention_bias", False) + 2 * hidden
    return embeddings(fields, hidden) + shape.layers * layer + mlps + hidden


def opt(fields: Fields, shape: Shape) -> int:
    """OPT: LayerNorms and biases everywhere, a plain MLP, learned positions (two more than it has), tied logits."""
    hidden, inner = shape.hidden, fields.integer("ffn_dim", USE)
    projected = fields.integer("word_embed_proj_dim", USE, hidden)
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    positions = (fields.integer("max_position_embeddings", USE) + 2) * hidden
    projections = 2 * hidden * projected if projected != hidden else 0
    return fields.integer("vocab_size", USE) * projected + projections + positions + shape.layers * layer + 2 * hidden


def phi(fields: Fields, shape: Shape) -> int:
    """Phi-1 and 2: one LayerNorm a layer, attention beside a plain MLP, biases everywhere."""
    hidden, inner = shape.hidden, fields.integer("intermediate_size", USE)
    layer = attention(fields, shape, True, True, False) + 2 * hidden * inner + inner + hidden + 2 * hidden
    vocabulary = fields.integer("vocab_size", USE)
    return 2 * vocabulary * hidden + vocabulary + shape.layers * layer + 2 * hidden


def glm4_moe(fields: Fields, shape: Shape) -> int:
    """GLM-4.5: grouped-query attention with biases on Q, K and V before DeepSeek's experts."""
    norm = fields.flag("use_qk_norm", USE)
    layer = attention(fields, shape, "attention_bias", False, norm) + 2 * shape.hidden
    mlps = feed_forward(fields, shape, router_bias=True)
    return embeddings(fields, shape.hidden) + shape.layers * layer + mlps + shape.hidden


def attention(fields: Fields, shape: Shape, qkv_bias: bool | str, output_bias: bool | str, query_key_norm: bool) -> int:
    """Q, K, V and output projections of one layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    total = 2 * shape.hidden * (queries + keys)
    total += queries + 2 * keys if _flag(fields, qkv_bias) else 0
    total += shape.hidden if _flag(fields, output_bias) else 0
    return total + (2 * shape.head_dim if query_key_norm else 0)


def embeddings(fields: Fields, hidden: int, tied: bool = False) -> int:
    """The token embedding, and the logits' matrix unless they share it."""
    shared = fields.flag("tie_word_embeddings", USE, tied)
    return fields.integer("vocab_size", USE) * hidden * (1 if shared else 2)


def feed_forward(fields: Fields, shape: Shape, *, router_bias: bool) -> int:
    """MLPs of all layers where the first few are dense and the rest are routed and shared experts (DeepSeek, GLM)."""
    hidden, width = shape.hidden, fields.integer("moe_intermediate_size", USE)
    first = fields.whole("first_k_dense_replace", USE, 0)
    kinds = fields.layer_kinds("mlp_layer_types", USE, shape.layers, ("dense", "sparse"))
    first = first if kinds is None else kinds.count("dense")
    experts = fields.integer("n_routed_experts", USE)
    shared = fields.whole("n_shared_experts", USE, 0)
    if first > shape.layers:
        raise ConfigError("first_k_dense_replace", f"config has {first} dense layers of {shape.layers}")
    router = experts * hidden + (experts if router_bias else 0)
    routed = 3 * hidden * width * (experts + shared) + router
    return first * 3 * hidden * fields.integer("intermediate_size", USE) + (shape.layers - first) * routed


def _flag(fields: Fields, value: bool | str) -> bool:
    return fields.flag(value, USE) if isinstance(value, str) else value
