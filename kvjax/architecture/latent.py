"""Multi-head latent attention: one latent and one rotated key a token, shared by all heads (DeepSeek-V2, section 2.1).

DeepSeek-V3.2 and GLM-5 add an indexer, whose keys are cached in fp8 with one float32 scale per 128 elements, as the
publishers' kernels do; transformers keeps them in the cache's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.architecture.attention import architecture
from kvjax.architecture.description import Architecture, CachedTensor, CacheGroup
from kvjax.architecture.fields import ConfigError, Fields
from kvjax.architecture.weights import USE, Shape, count, embeddings, feed_forward

INDEXER_SCALE_GROUP = 128
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""What versions of transformers call layers with an indexer."""


def latent_tensor(fields: Fields) -> CachedTensor:
    """The latent and the rotated key as one row: both are always read together, and the value is a part of it."""
    rank = fields.integer("kv_lora_rank", "width of the cached latent")
    rotated = fields.integer("qk_rope_head_dim", "width of the cached rotated key")
    # FlashMLA's fp8 row: e4m3 codes, a float32 scale per 128 of them, the rotated key in bfloat16 (656 B for 512 + 64).
    packed = rank + 4 * -(-rank // 128) + 2 * rotated
    return CachedTensor("latent", 1, rank + rotated, sharded=False, packed={"fp8": packed})


def indexer_key(fields: Fields) -> CachedTensor:
    """The lightning indexer's key: fp8 whatever the rest of the cache is."""
    width = fields.integer("index_head_dim", "width of the indexer's cached key")
    scales = -(-width // INDEXER_SCALE_GROUP)
    return CachedTensor(
        "indexer_key",
        1,
        width,
        sharded=False,
        packed={"fp8": width + 4 * scales},
        format="fp8",
    )


def latent_reader(*, indexer: bool = False, router_bias: bool = True) -> Callable[[Fields], Architecture]:
    """A reader for DeepSeek-V2, V3, V3.2, Kimi K2 and GLM-5."""

    def read(fields: Fields) -> Architecture:
        layers = fields.layers()
        heads = fields.integer("num_attention_heads", "query heads")
        hidden = fields.integer("hidden_size", "width of a hidden state")
        shape = Shape(layers, hidden, heads)
        latent = latent_tensor(fields)
        # Both stand for what latents replace, and transformers sets head_dim to the rotated width.
        fields.skip("num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim", "q_lora_rank")
        fields.skip("mlp_layer_types")
        everything = tuple(range(layers))
        groups = [CacheGroup("latent", "latent attention", everything, (latent,))]
        if indexer:
            fields.integer("index_n_heads", "the indexer's query heads, which are not cached")
            fields.layer_kinds("layer_types", "which layers are indexed", layers, INDEXED)
            indexed = _indexed_layers(fields, layers)
            groups.append(CacheGroup("indexer", "indexer keys", indexed, (indexer_key(fields),)))

        def counter(fields: Fields, shape: Shape) -> int:
            layer = latent_weights(fields, shape) + 2 * hidden
            indexers = len(groups[1].layers) * _indexer_weights(fields, hidden) if indexer else 0
            total = embeddings(fields, hidden) + layers * layer + indexers + hidden
            return total + feed_forward(fields, shape, router_bias=router_bias)

        return architecture(fields, shape, tuple(groups), *count(fields, shape, counter))

    return read


def latent_weights(fields: Fields, shape: Shape) -> int:
    """The projections of one latent attention layer and the norms of its two latents."""
    rank, rotated = fields.integer("kv_lora_rank", USE), fields.integer("qk_rope_head_dim", USE)
    unrotated, value = fields.integer("qk_nope_head_dim", USE), fields.integer("v_head_dim", USE)
    query_rank = fields.optional("q_lora_rank", USE)
    queries = shape.heads * (unrotated + rotated)
    query = shape.hidden * queries if query_rank is None else query_rank * (shape.hidden + 1 + queries)
    key_value = shape.hidden * (rank + rotated) + rank + rank * shape.heads * (unrotated + value)
    return query + key_value + shape.heads * value * shape.hidden


def _indexer_weights(fields: Fields, hidden: int) -> int:
    """Query and key projections, the key's LayerNorm and the heads' weights."""
    heads, width = fields.integer("index_n_heads", USE), fields.integer("index_head_dim", USE)
    return fields.integer("q_lora_rank", USE) * heads * width + hidden * width + 2 * width + hidden * heads


def _indexed_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers with an indexer of their own; the others use the choice of one before them (GLM-5)."""
    kinds = fields.layer_kinds("indexer_types", "which layers have an indexer", layers, ("full", "shared"))
    pattern = fields.raw("index_topk_pattern", "which layers have an indexer: F or S a layer")
    every = fields.integer("index_topk_freq", "one layer in this many has an indexer", 1)
    offset = fields.whole("index_skip_topk_offset", "layers before that pattern begins", 2)
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise ConfigError("index_topk_pattern", f"config index_topk_pattern={pattern!r} must be F or S a layer")
        kinds = tuple("full" if letter == "F" else "shared" for letter in pattern)
    if kinds is None:
        return tuple(layer for layer in range(layers) if max(layer - offset + 1, 0) % every == 0)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
