"""Recurrent layers: a state of fixed size a sequence instead of keys and values.

Recurrent states are float32, as the models' own code keeps them.  A convolution of k taps keeps the k − 1 inputs before
the next one, which is what it needs; transformers keeps k.
"""

from __future__ import annotations

from collections.abc import Callable

from kvjax.architecture.attention import architecture, attention_groups, attention_shape
from kvjax.architecture.description import Architecture, CacheGroup, StateTensor
from kvjax.architecture.fields import ConfigError, Fields
from kvjax.architecture.latent import latent_tensor
from kvjax.architecture.weights import Shape

LINEAR, FULL = "linear_attention", "full_attention"
STATE_DTYPE = "float32"


def read_kimi_linear(fields: Fields) -> Architecture:
    """Kimi Linear and Kimi K3: Kimi delta attention (KDA) in most layers, latent attention in the others."""
    layers = fields.layers()
    heads = fields.integer("num_attention_heads", "query heads")
    hidden = fields.integer("hidden_size", "width of a hidden state")
    fields.skip("num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim", "q_lora_rank")
    fields.skip("routed_expert_hidden_size", "latent_moe_use_norm", "attn_res_block_size")
    if fields.has("linear_attn_config"):
        linear = fields.section("linear_attn_config")
        linear.skip("gate_lower_bound", "use_full_rank_gate")
        kda = linear.integers("kda_layers", "layers with KDA, counted from 1")
        full = linear.integers("full_attn_layers", "layers with latent attention, counted from 1")
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
        if kda is None or full is None or sorted((*kda, *full)) != list(range(1, layers + 1)):
            raise ConfigError("kda_layers", f"config kda_layers and full_attn_layers must share out layers 1…{layers}")
        recurrent, attending = (tuple(layer - 1 for layer in one) for one in (kda, full))
    else:
        linear, names = fields, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        kinds = _required_kinds(fields, layers)
        recurrent, attending = _of_kind(kinds, LINEAR), _of_kind(kinds, FULL)
    state_heads = linear.integer(names[0], "heads of the recurrent state")
    width = linear.integer(names[1], "rows and columns of a head's state")
    taps = linear.integer(names[2], "taps of the convolutions of q, k and v")
    states = (
        StateTensor("recurrent", (state_heads, width, width), STATE_DTYPE, state_heads),
        StateTensor("convolution", (3 * state_heads * width, taps - 1), "bfloat16", state_heads),
    )
    groups = (
        CacheGroup("latent", "latent attention", attending, (latent_tensor(fields),)),
        CacheGroup("kda", "Kimi delta attention", recurrent, states=states),
    )
    return architecture(fields, Shape(layers, hidden, heads), groups, *_uncounted(fields))


def read_qwen3_next(fields: Fields) -> Architecture:
    """Qwen3-Next: gated delta nets, every fourth layer full attention."""
    shape = attention_shape(fields, head_dim="required")
    layers = shape.layers
    kinds = fields.layer_kinds("layer_types", "which layers attend", layers, (LINEAR, FULL))
    every = fields.integer("full_attention_interval", "one layer in this many attends", 4)
    kinds = kinds or tuple(LINEAR if (layer + 1) % every else FULL for layer in range(layers))
    key_heads = fields.integer("linear_num_key_heads", "key heads of the recurrent state")
    heads = fields.integer("linear_num_value_heads", "heads of the recurrent state")
    key = fields.integer("linear_key_head_dim", "rows of a head's state")
    value = fields.integer("linear_value_head_dim", "columns of a head's state")
    taps = fields.integer("linear_conv_kernel_dim", "taps of the convolution")
    states = (
        StateTensor("recurrent", (heads, key, value), STATE_DTYPE, heads),
        StateTensor("convolution", (2 * key_heads * key + heads * value, taps - 1), "bfloat16", key_heads),
    )
    return _hybrid(fields, shape, kinds, CacheGroup("delta", "gated delta net", _of_kind(kinds, LINEAR), states=states))


def read_minimax(fields: Fields) -> Architecture:
    """MiniMax-Text-01: lightning attention, whose state is one matrix a head, and some full attention."""
    shape = attention_shape(fields)
    layers = shape.layers
    kinds = fields.layer_kinds("layer_types", "which layers attend", layers, (LINEAR, FULL))
    by_number = fields.integers("attn_type_list", "which layers attend: 1, or 0 for lightning attention", layers)
    if kinds is None and by_number is not None:
        kinds = tuple(FULL if one == 1 else LINEAR for one in by_number)
    if kinds is None:
        raise ConfigError("attn_type_list", "config has no field 'layer_types' or 'attn_type_list'; add one")
    fields.skip(
        "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor", "linear_attn_beta_factor"
    )
    fields.skip("layernorm_full_attention_alpha", "layernorm_full_attention_beta")
    fields.skip("layernorm_linear_attention_alpha", "layernorm_linear_attention_beta")
    states = (StateTensor("recurrent", (shape.heads, shape.head_dim, shape.head_dim), STATE_DTYPE, shape.heads),)
    group = CacheGroup("lightning", "lightning attention", _of_kind(kinds, LINEAR), states=states)
    return _hybrid(fields, shape, kinds, group)


def read_mamba2(fields: Fields) -> Architecture:
    """Mamba-2 alone: no attention at all."""
    layers = fields.layers()
    hidden = fields.integer("hidden_size", "width of a hidden state")
    heads, width = fields.integer("num_heads", "heads of the state"), fields.integer("head_dim", "rows of a head")
    fields.skip("use_conv_bias", "chunk_size")
    states = mamba2_states(
        heads,
        width,
        groups=fields.integer("n_groups", "groups of B and C"),
        state=fields.integer("state_size", "columns of a head's state"),
        taps=fields.integer("conv_kernel", "taps of the convolution"),
    )
    group = CacheGroup("mamba", "Mamba-2", tuple(range(layers)), states=states)
    return architecture(fields, Shape(layers, hidden), (group,), *_uncounted(fields))


def read_jamba(fields: Fields) -> Architecture:
    """Jamba: Mamba-1, one layer in a period attends."""
    shape = attention_shape(fields)
    layers = shape.layers
    period = fields.integer("attn_layer_period", "one layer in this many attends")
    offset = fields.whole("attn_layer_offset", "the first layer that attends", 0)
    kinds = tuple(FULL if layer % period == offset else LINEAR for layer in range(layers))
    fields.skip("use_mamba_kernels", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias", "mamba_inner_layernorms")
    inner = shape.hidden * fields.integer("mamba_expand", "channels of the state, in hidden sizes")
    states = (
        StateTensor("recurrent", (inner, fields.integer("mamba_d_state", "state of a channel")), STATE_DTYPE, inner),
        StateTensor("convolution", (inner, fields.integer("mamba_d_conv", "taps") - 1), "bfloat16", inner),
    )
    return _hybrid(fields, shape, kinds, CacheGroup("mamba", "Mamba", _of_kind(kinds, LINEAR), states=states))


def mamba2_hybrid(kinds_of: Callable[[Fields, int], tuple[str, ...]]) -> Callable[[Fields], Architecture]:
    """Bamba, Granite 4 and Falcon-H1: Mamba-2 layers with `mamba_` fields, and grouped-query attention.

    `kinds_of` says for each layer LINEAR, FULL or "both".
    """

    def read(fields: Fields) -> Architecture:
        shape = attention_shape(fields, kv_heads="heads")
        kinds = kinds_of(fields, shape.layers)
        heads = fields.integer("mamba_n_heads", "heads of the state")
        inner = fields.optional("mamba_d_ssm", "channels of the state")
        expand = fields.integer("mamba_expand", "channels of the state, in hidden sizes", 2)
        inner = expand * shape.hidden if inner is None else inner
        width = fields.raw("mamba_d_head", "rows of a head's state", "auto")
        if width == "auto":
            width = inner // heads
        if not isinstance(width, int) or heads * width != inner:
            raise ConfigError("mamba_d_head", f"config mamba_d_head={width!r} × {heads} heads must be {inner} channels")
        fields.skip(
            "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_norm_before_gate", "mamba_rms_norm"
        )
        fields.skip("mamba_use_mlp", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier")
        states = mamba2_states(
            heads,
            width,
            groups=fields.integer("mamba_n_groups", "groups of B and C"),
            state=fields.integer("mamba_d_state", "columns of a head's state"),
            taps=fields.integer("mamba_d_conv", "taps of the convolution"),
        )
        mamba = tuple(layer for layer, kind in enumerate(kinds) if kind != FULL)
        return _hybrid(fields, shape, kinds, CacheGroup("mamba", "Mamba-2", mamba, states=states))

    return read


def read_nemotron_h(fields: Fields) -> Architecture:
    """Nemotron-H: Mamba-2, attention, MLPs and experts, one a layer."""
    kinds = _nemotron_kinds(fields)
    shape = attention_shape(fields, layers=len(kinds))
    if shape.layers != len(kinds):
        raise ConfigError("num_hidden_layers", f"config names the kinds of {len(kinds)} layers and has {shape.layers}")
    fields.skip("use_mamba_kernels", "mamba_hidden_act", "mamba_proj_bias", "mamba_num_groups", "chunk_size")
    fields.skip(
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "mamba_dt_min",
        "mamba_dt_max",
        "mamba_dt_limit",
        "use_conv_bias",
    )
    fields.skip("mamba_ssm_cache_dtype", "moe_latent_size", "expand")
    states = mamba2_states(
        fields.integer("mamba_num_heads", "heads of the state"),
        fields.integer("mamba_head_dim", "rows of a head's state"),
        groups=fields.integer("n_groups", "groups of B and C"),
        state=fields.integer("ssm_state_size", "columns of a head's state"),
        taps=fields.integer("conv_kernel", "taps of the convolution"),
    )
    return _hybrid(fields, shape, kinds, CacheGroup("mamba", "Mamba-2", _of_kind(kinds, LINEAR), states=states))


def _nemotron_kinds(fields: Fields) -> tuple[str, ...]:
    """The kind of every layer, by name or from a pattern: M is Mamba-2, * attention, - an MLP, E experts."""
    named = {"linear_attention": LINEAR, "mamba": LINEAR, "full_attention": FULL, "attention": FULL}
    field = "layer_types" if fields.has("layer_types") else "layers_block_type"
    use = "the kind of every layer"
    kinds = fields.sequence(field, use)
    pattern = fields.raw("hybrid_override_pattern", f"{use}: M, *, - or E")
    if kinds is not None:
        kinds = fields.layer_kinds(field, use, len(kinds), (*named, "mlp", "moe")) or ()
        if kinds:
            return tuple(named.get(kind, "none") for kind in kinds)
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("M*-E"):
        raise ConfigError(
            "hybrid_override_pattern", f"config hybrid_override_pattern={pattern!r} must be of M, *, - and E"
        )
    return tuple({"M": LINEAR, "*": FULL}.get(letter, "none") for letter in pattern)


def mamba2_states(heads: int, width: int, *, groups: int, state: int, taps: int) -> tuple[StateTensor, StateTensor]:
    """A Mamba-2 layer's state and its convolution over x, B and C."""
    return (
        StateTensor("recurrent", (heads, width, state), STATE_DTYPE, heads),
        StateTensor("convolution", (heads * width + 2 * groups * state, taps - 1), "bfloat16", groups),
    )


def bamba_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Bamba lists the layers that attend."""
    attending = fields.integers("attn_layer_indices", "layers that attend") or ()
    return tuple(FULL if layer in attending else LINEAR for layer in range(layers))


def granite_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Granite 4 names every layer "mamba" or "attention"."""
    kinds = fields.layer_kinds("layer_types", "which layers attend", layers, ("mamba", "attention", LINEAR, FULL))
    if kinds is None:
        raise ConfigError("layer_types", "config has no field 'layer_types'; add it (one name a layer)")
    return tuple(FULL if kind in ("attention", FULL) else LINEAR for kind in kinds)


def falcon_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Falcon-H1 has attention and Mamba-2 side by side in every layer."""
    return ("both",) * layers


def _hybrid(fields: Fields, shape: Shape, kinds: tuple[str, ...], recurrent: CacheGroup) -> Architecture:
    """Full attention in the layers that are not LINEAR, and a recurrent group."""
    attending = tuple(layer for layer, kind in enumerate(kinds) if kind in (FULL, "both"))
    groups = attention_groups(shape, (None,) * len(attending), layers=attending)
    return architecture(fields, shape, (*groups, recurrent), *_uncounted(fields))


def _of_kind(kinds: tuple[str, ...], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, one in enumerate(kinds) if one == kind)


def _required_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    kinds = fields.layer_kinds("layer_types", "which layers attend", layers, (LINEAR, FULL))
    if kinds is None:
        raise ConfigError("layer_types", "config has no field 'linear_attn_config' or 'layer_types'; add one")
    return kinds


def _uncounted(fields: Fields) -> tuple[None, str]:
    return None, f"the weights of {fields.family} are not counted by this version"
