"""DeepSeek-V4: a window of raw entries, compressed entries (CSA and HCA) and the tails of their open windows.

Technical report, arXiv 2606.19348, sections 2.3 and 3.5.1.  A block of pages stands for lcm(4, 128) = 128 tokens:
32 CSA entries, with as many indexer keys, and one HCA entry.  The window and the tails are a fixed block a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.architecture.attention import architecture
from kvjax.architecture.description import Architecture, CachedTensor, CacheGroup, StateTensor
from kvjax.architecture.fields import ConfigError, Fields
from kvjax.architecture.latent import indexer_key
from kvjax.architecture.weights import Shape

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
OVERLAP = {SPARSE: 2, HEAVY: 1}
"""Windows of tokens that an entry is made of: CSA entries also see the window before."""
SCALE_GROUP = 64


def read_compressed(fields: Fields) -> Architecture:
    """A reader for DeepSeek-V4."""
    layers = fields.layers()
    heads = fields.integer("num_attention_heads", "query heads")
    hidden = fields.integer("hidden_size", "width of a hidden state")
    width = fields.integer("head_dim", "width of an entry; key and value are the same")
    rotated = fields.integer("qk_rope_head_dim", "the part of an entry kept in bf16", _rotated(fields, width))
    if rotated >= width:
        raise ConfigError("qk_rope_head_dim", f"config qk_rope_head_dim={rotated} must be below head_dim={width}")
    window = fields.integer("sliding_window", "raw entries every layer keeps")
    if fields.integer("num_key_value_heads", "cached heads", 1) != 1:
        raise ConfigError("num_key_value_heads", "config num_key_value_heads must be 1: all heads share an entry")
    fields.skip("q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "num_hash_layers", "expert_dtype")
    fields.skip("mlp_layer_types", "hc_mult", "hc_eps", "hc_sinkhorn_iters", "num_nextn_predict_layers")

    rates, kinds = _rates(fields), _kinds(fields, layers)
    # e4m3 codes and bf16 for the rotated part, a ue8m0 scale per 64 codes, padded to 8 bytes: 448 + 128 + 7 + 1 = 584.
    codes = width - rotated
    packed = -(-(codes + 2 * rotated + -(-codes // SCALE_GROUP)) // 8) * 8
    entry = CachedTensor("entry", 1, width, sharded=False, packed={"fp8": packed})
    index = indexer_key(fields)

    def tail(rate: int, overlap: int, name: str, elements: int) -> tuple[StateTensor, ...]:
        shape = (overlap * rate, overlap * elements)
        return StateTensor(f"{name}_values", shape, "float32"), StateTensor(f"{name}_scores", shape, "float32")

    groups = [
        CacheGroup("window", "window of raw entries", tuple(range(layers)), (entry,), window=window, resident=True)
    ]
    for kind, name, mechanism in ((SPARSE, "csa", "sparse compressed attention"), (HEAVY, "hca", "heavy compression")):
        mine = tuple(layer for layer, one in enumerate(kinds) if one == kind)
        if not mine:
            continue
        rate, overlap = rates[kind], OVERLAP[kind]
        states = tail(rate, overlap, "tail", width)
        if kind == SPARSE:
            states += tail(rate, overlap, "indexer_tail", index.width)
        tensors = (entry, index) if kind == SPARSE else (entry,)
        groups.append(CacheGroup(name, mechanism, mine, tensors, states, tokens_per_entry=rate))
    note = "the weights of deepseek_v4 are not counted by this version"
    return architecture(fields, Shape(layers, hidden, heads), tuple(groups), None, note, kv_format="fp8")


def _rotated(fields: Fields, width: int) -> int | None:
    factor = fields.raw("partial_rotary_factor", "the part of an entry that is rotated")
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1:
        raise ConfigError("partial_rotary_factor", f"config partial_rotary_factor={factor!r} must be between 0 and 1")
    return int(width * factor)


def _rates(fields: Fields) -> dict[str, int]:
    """Tokens an entry of each kind stands for."""
    given = fields.raw("compress_rates", "tokens an entry stands for, by kind", RATES)
    if not isinstance(given, Mapping) or set(given) != set(RATES):
        raise ConfigError("compress_rates", f"config compress_rates={given!r} must give {SPARSE} and {HEAVY} a number")
    rates = {kind: Fields(given, fields.family).integer(kind, "") for kind in RATES}
    for kind, field in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        rates[kind] = fields.integer(field, f"tokens an entry stands for in {kind}", rates[kind])
    return rates


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """The kind of every layer, from `layer_types` or from the checkpoint's `compress_ratios` (0, 4 or 128 a layer)."""
    kinds = fields.layer_kinds("layer_types", "which layers compress how", layers, (SLIDING, SPARSE, HEAVY))
    ratios = fields.integers("compress_ratios", "which layers compress how")
    if kinds is not None:
        return kinds
    if ratios is None:
        raise ConfigError("layer_types", "config has no field 'layer_types' or 'compress_ratios'; add one")
    by_ratio = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    # The checkpoints give one more for each of their MTP layers.
    if len(ratios) < layers or any(ratio not in by_ratio for ratio in ratios):
        raise ConfigError("compress_ratios", f"config compress_ratios must be 0, 4 or 128 for each of {layers} layers")
    return tuple(by_ratio[ratio] for ratio in ratios[:layers])
