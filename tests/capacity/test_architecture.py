"""Reading configs: every family, what each field was used for, and what is refused instead of guessed."""

import json

import pytest

from kvjax.architecture import MODEL_TYPES, ConfigError, config_of_gguf, read_architecture
from tests.capacity.configs import NAMES, architecture, config

PUBLISHED_PARAMETERS = {
    # As counted from the published checkpoints' tensors.
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2": 235_741_434_880,
}
ROUNDED_PARAMETERS = {
    # What the publishers say in words, in 10⁹.
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "minimax-m2": 229,
    "opt-13b": 12.85,
    "gemma-3-27b": 27.0,
    "glm-4-9b": 9.4,
}


def test_every_fixture_can_be_read_and_its_layers_are_accounted_for():
    for name in NAMES:
        model = architecture(name)
        cached = {layer for group in model.groups for layer in group.layers}
        assert cached <= set(range(model.num_layers)), name
        assert model.uses[0].field == "model_type" and model.uses[0].given
        if not name.startswith("nemotron"):  # whose MLPs are layers of their own
            assert len(cached) == model.num_layers, name


def test_the_fixtures_cover_the_families_that_are_promised():
    types = {config(name)["model_type"] for name in NAMES}
    assert types <= set(MODEL_TYPES)
    promised = """llama llama4 mistral mixtral qwen2 qwen3 qwen3_moe qwen3_next gemma2 gemma3 gemma3_text phi phi3
        gpt_oss deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 kimi_k2 kimi_linear kimi_k3 glm glm4_moe glm_moe_dsa
        minimax_text_01 minimax_m2 jamba bamba mamba2 nemotron_h opt"""
    assert types >= set(promised.split())


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_weights_are_counted_exactly(name):
    assert architecture(name).parameters == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED_PARAMETERS)
def test_weights_agree_with_what_publishers_say(name):
    assert architecture(name).parameters / 1e9 == pytest.approx(ROUNDED_PARAMETERS[name], rel=2e-3)


def test_weights_that_are_not_counted_say_why():
    model = architecture("deepseek-v4-pro")
    assert model.parameters is None and "deepseek_v4" in model.parameters_note
    nameless = {field: value for field, value in config("llama-3-8b").items() if field != "vocab_size"}
    model = read_architecture(nameless)
    assert model.parameters is None and "'vocab_size'" in model.parameters_note


WINDOWS = {
    # Group by group: (name, layers, window).
    "mistral-7b": [("window", 32, 4096)],
    "mixtral-8x7b": [("full", 32, None)],
    "qwen2-7b": [("full", 28, None)],  # it has a sliding_window, and use_sliding_window is false
    "gemma-2-9b": [("window", 21, 4096), ("full", 21, None)],
    "gemma-3-27b": [("window", 52, 1024), ("full", 10, None)],
    "gemma-3-270m": [("window", 15, 512), ("full", 3, None)],
    "gpt-oss-20b": [("window", 12, 128), ("full", 12, None)],
    "gpt-oss-120b": [("window", 18, 128), ("full", 18, None)],
    "phi-3-mini-4k": [("window", 32, 2047)],
    "llama-4-scout": [("chunk", 36, 8192), ("full", 12, None)],
    "qwen3-next-80b": [("full", 12, None), ("delta", 36, None)],
    "kimi-linear-48b": [("latent", 7, None), ("kda", 20, None)],
    "kimi-k3": [("latent", 24, None), ("kda", 69, None)],
    "deepseek-v4-flash": [("window", 43, 128), ("csa", 21, None), ("hca", 20, None)],
    "deepseek-v4-pro": [("window", 61, 128), ("csa", 30, None), ("hca", 31, None)],
    "minimax-text-01": [("full", 10, None), ("lightning", 70, None)],
    "jamba-v0.1": [("full", 4, None), ("mamba", 28, None)],
    "bamba-9b": [("full", 3, None), ("mamba", 29, None)],
    "nemotron-h-8b": [("full", 4, None), ("mamba", 24, None)],
}


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_are_grouped_by_what_they_keep(name):
    assert [(group.name, len(group.layers), group.window) for group in architecture(name).groups] == WINDOWS[name]


def test_which_layers_attend_to_everything():
    assert architecture("gemma-3-270m").group("full").layers == (5, 11, 17)
    assert architecture("gpt-oss-20b").group("window").layers[:2] == (0, 2)  # sliding first
    assert architecture("llama-4-scout").group("full").layers[:2] == (3, 7)  # those without rotary positions
    assert architecture("kimi-linear-48b").group("latent").layers == (3, 7, 11, 15, 19, 23, 26)
    assert architecture("jamba-v0.1").group("full").layers == (4, 12, 20, 28)
    assert architecture("qwen3-next-80b").group("full").layers[:2] == (3, 7)
    assert architecture("deepseek-v4-flash").group("csa").layers[:2] == (2, 4)


def test_qwen_windows_begin_at_a_layer():
    changed = {**config("qwen3-8b"), "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
    groups = read_architecture(changed).groups
    assert [(group.name, group.layers[0], group.window) for group in groups] == [
        ("full", 0, None),
        ("window", 30, 4096),
    ]


def test_glm_layers_can_share_an_indexer():
    shared = {**config("glm-5"), "index_topk_pattern": "F" * 3 + "S" * 75}
    assert architecture("glm-5").group("indexer").layers == tuple(range(78))
    assert read_architecture(shared).group("indexer").layers == (0, 1, 2)
    assert read_architecture(shared).group("latent").layers == tuple(range(78))


def test_each_use_of_a_field_is_recorded():
    uses = {use.field: use for use in architecture("gemma-3-27b").uses}
    assert uses["text_config.num_key_value_heads"].use.startswith("cached heads")
    assert uses["text_config.sliding_window"].value == 1024 and uses["text_config.sliding_window"].given
    assert uses["text_config.sliding_window_pattern"].value == 6
    assert not uses["text_config.sliding_window_pattern"].given  # a default of the family, and marked as one


def test_v4_layer_types_say_the_same_as_the_checkpoint_s_ratios():
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    given = config("deepseek-v4-flash")
    ratios = given.pop("compress_ratios")
    named = read_architecture({**given, "layer_types": [names[ratio] for ratio in ratios[:43]]})
    assert named.groups == architecture("deepseek-v4-flash").groups


@pytest.mark.parametrize("name", ["qwen3-next-80b", "minimax-text-01", "kimi-linear-48b"])
def test_the_layers_of_a_hybrid_can_be_named(name):
    """As transformers writes them, instead of the publisher's interval or list."""
    attending = set(architecture(name).groups[0].layers)
    given = config(name)
    given.pop("full_attention_interval", None)
    given.pop("attn_type_list", None)
    if (linear := given.pop("linear_attn_config", None)) is not None:
        given |= {"linear_num_heads": linear["num_heads"], "linear_head_dim": linear["head_dim"]}
        given |= {"linear_conv_kernel_dim": linear["short_conv_kernel_size"]}
    layers = range(given["num_hidden_layers"])
    kinds = ["full_attention" if layer in attending else "linear_attention" for layer in layers]
    assert read_architecture({**given, "layer_types": kinds}).groups == architecture(name).groups


def test_granite_names_its_layers():
    """Granite 4: Bamba's fields with a name for every layer."""
    given = {**config("bamba-9b"), "model_type": "granitemoehybrid"}
    attending = given.pop("attn_layer_indices")
    kinds = ["attention" if layer in attending else "mamba" for layer in range(32)]
    assert read_architecture({**given, "layer_types": kinds}).groups == architecture("bamba-9b").groups


def test_nemotron_layers_can_be_named():
    """As newer versions of transformers write them, and under their older names."""
    given = config("nemotron-h-8b")
    pattern = given.pop("hybrid_override_pattern")
    for names in (
        {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
        {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"},
    ):
        for field in ("layers_block_type", "layer_types"):
            named = read_architecture({**given, field: [names[letter] for letter in pattern]})
            assert named.groups == architecture("nemotron-h-8b").groups


def test_glm_configs_as_newer_versions_write_them():
    """Every layer named sparse attention, MLPs by name, and indexers that layers share (GLM-5.2)."""
    given = config("glm-5")
    given.pop("first_k_dense_replace")
    shared = ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)]
    named = {
        "layer_types": ["deepseek_sparse_attention"] * 78,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "indexer_types": shared,
    }
    model = read_architecture({**given, **named})
    assert len(model.group("latent").layers) == 78 and len(model.group("indexer").layers) == 21
    whole = read_architecture({**given, "mlp_layer_types": named["mlp_layer_types"]})
    assert whole.parameters == architecture("glm-5").parameters


REFUSED = {
    "unknown family": ("llama-3-8b", {"model_type": "rwkv7"}, "model_type='rwkv7' is not supported; known: bamba"),
    "no family": ("llama-3-8b", {"model_type": None}, "model_type=None"),
    "shared caches": ("llama-3-8b", {"num_kv_shared_layers": 20}, "'num_kv_shared_layers' = 20 is not known for llama"),
    "a new window": ("llama-3-8b", {"local_window": 512}, "'local_window' = 512"),
    "windows by another name": ("qwen3-8b", {"use_swa": True}, "'use_swa' = True"),
    "fewer heads by another name": ("llama-3-8b", {"multi_query": True}, "'multi_query' = True"),
    "a new rank": ("qwen3-8b", {"kv_rank": 64}, "'kv_rank' = 64"),
    "a new state": ("qwen3-8b", {"memory_state_size": 64}, "'memory_state_size' = 64"),
    "layer kinds": ("llama-3-8b", {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]}, "at layer 31"),
    "an unknown kind": ("gemma-3-270m", {"layer_types": ["sparse"] * 18}, "'sparse' at layer 0"),
    "too few kinds": ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "one element for each of 24 layers"),
    "no window": ("gpt-oss-20b", {"sliding_window": None}, "'sliding_attention' and sliding_window is null"),
    "no heads": ("mixtral-8x7b", {"num_key_value_heads": None}, "no field 'num_key_value_heads'"),
    "text for a number": ("mixtral-8x7b", {"num_key_value_heads": "8"}, "'num_key_value_heads'='8'"),
    "zero": ("deepseek-v3", {"kv_lora_rank": 0}, "'kv_lora_rank'=0 must be a positive integer"),
    "true is no number": ("deepseek-v3", {"num_hidden_layers": True}, "'num_hidden_layers'=True"),
    "heads that do not divide": ("llama-3-8b", {"num_key_value_heads": 5}, "multiple of kv_heads=5"),
    "an unknown ratio": ("deepseek-v4-pro", {"compress_ratios": [8] * 61}, "0, 4 or 128"),
    "layers left out": ("kimi-linear-48b", {"num_hidden_layers": 28}, "share out layers 1…28"),
    "a broken pattern": ("nemotron-h-8b", {"hybrid_override_pattern": "M?"}, "must be of M, \\*, - and E"),
    "no section": ("llama-4-scout", {"text_config": 3}, "'text_config' is 3; it must be an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case):
    name, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        read_architecture({**config(name), **changes})


def test_an_unknown_field_in_a_section_is_named_with_it():
    changed = config("gemma-3-27b")
    changed["text_config"]["num_kv_shared_layers"] = 10
    with pytest.raises(ConfigError, match=r"'text_config\.num_kv_shared_layers' = 10"):
        read_architecture(changed)


def test_fields_of_other_things_are_let_pass():
    more = {"quantisation_note": "x", "auto_map": {}, "new_scheme": 7, "num_kv_shared_layers": None}
    assert read_architecture({**config("llama-3-8b"), **more}).groups == architecture("llama-3-8b").groups


NONSENSE = (
    None,
    True,
    -1,
    0,
    1.5,
    "x",
    "",
    [],
    [1, "x", None],
    {},
    {"a": []},
    2**31,
    10**400,
    float("nan"),
    float("inf"),
)


@pytest.mark.parametrize("name", NAMES)
def test_any_value_in_any_field_is_read_or_refused(name):
    """Every field set to every kind of nonsense: a description or a ConfigError, and nothing that runs away."""
    given = config(name)
    sections = [((), given), *(((key,), value) for key, value in given.items() if isinstance(value, dict))]
    for path, section in sections:
        for field in section:
            for value in NONSENSE:
                changed = {**given, path[0]: {**section, field: value}} if path else {**given, field: value}
                try:
                    model = read_architecture(changed)
                except ConfigError:
                    continue
                assert model.groups and all(group.layers for group in model.groups), (path, field, value)


@pytest.mark.parametrize("nonsense", [None, [], 3, "llama", {}])
def test_what_is_no_config_is_refused(nonsense):
    with pytest.raises(ConfigError):
        read_architecture(nonsense)


def gguf(architecture: str, **fields):
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()},
    }


SHAPE = {
    "block_count": 18,
    "embedding_length": 640,
    "feed_forward_length": 2048,
    "context_length": 32768,
    "attention__head_count": 4,
}


def test_a_gguf_header_reads_like_a_config():
    header = gguf(
        "gemma3",
        **SHAPE,
        attention__head_count_kv=1,
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window=512,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1e6,
        vocab_size=262144,
    )
    model = read_architecture(config_of_gguf(header))
    assert model.groups == architecture("gemma-3-270m").groups
    assert model.parameters == architecture("gemma-3-270m").parameters


def test_a_latent_gguf_header():
    shape = {**SHAPE, "attention__head_count": 16, "attention__head_count_kv": 1}
    header = gguf(
        "deepseek2", **shape, attention__kv_lora_rank=512, rope__dimension_count=64, attention__key_length=576
    )
    (group,) = read_architecture(config_of_gguf(header)).groups
    assert group.tensors[0].width == 576


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "general.architecture=None is not supported"),
        (gguf("rwkv6"), "'rwkv6' is not supported; known: deepseek2"),
        (gguf("llama", **SHAPE, attention__head_count_kv=[1, 2]), "differs between layers"),
        (gguf("llama", **SHAPE, attention__new_thing=3), "attention.new_thing=3 is not known"),
        (gguf("llama", **SHAPE, attention__key_length=64, attention__value_length=32), "value_length=32 differs"),
        (gguf("llama", ssm__state_size=16), "ssm.state_size=16"),
        (gguf("llama", **SHAPE) | {"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens=5 must be a list"),
    ],
)
def test_gguf_headers_that_are_refused(header, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(config_of_gguf(header))


def test_a_llama_header_with_experts_is_mixtral():
    """GGUF has one architecture for both; its weights are those of all experts."""
    given = config("mixtral-8x7b")
    header = gguf(
        "llama",
        block_count=given["num_hidden_layers"],
        embedding_length=given["hidden_size"],
        feed_forward_length=given["intermediate_size"],
        context_length=given["max_position_embeddings"],
        attention__head_count=given["num_attention_heads"],
        attention__head_count_kv=given["num_key_value_heads"],
        expert_count=given["num_local_experts"],
        expert_used_count=given["num_experts_per_tok"],
        vocab_size=given["vocab_size"],
    )
    model = read_architecture(config_of_gguf(header))
    assert model.model_type == "mixtral" and model.parameters == PUBLISHED_PARAMETERS["mixtral-8x7b"]
    assert model.groups == architecture("mixtral-8x7b").groups


def test_configs_are_small():
    for name in NAMES:
        assert len(json.dumps(config(name))) < 6000


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_layers_that_are_all_named_full_are_layers_without_a_window(family):
    config = {
        "model_type": family,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    }
    assert [group.window for group in read_architecture(config).groups] == [None]
    with pytest.raises(ConfigError, match="layer_types"):
        read_architecture(config | {"layer_types": ["full_attention", "sliding_attention"]})
