"""Bytes from configs alone: published figures, every format, every kind of parallelism, windows to the token."""

from dataclasses import replace
from fractions import Fraction

import pytest

from kvjax.capacity import FORMATS, Parallelism, group_sizes, weight_bytes
from tests.capacity.configs import NAMES, architecture

KIB, MIB = 2**10, 2**20


def sizes(name, kv_format="bf16", **more):
    return {one.group.name: one for one in group_sizes(architecture(name).groups, kv_format, **more)}


def per_token(name, kv_format="bf16", **more):
    return sum(one.bytes_per_token for one in sizes(name, kv_format, **more).values())


PUBLISHED_PER_TOKEN = {
    # OPT-13B: 800 KB a token (Kwon et al. 2023, section 3), which is KiB.  The others: 2 · L · H_kv · d_h · 2 B.
    ("opt-13b", "fp16"): 800 * KIB,
    ("llama-2-7b", "bf16"): 512 * KIB,
    ("llama-3-8b", "bf16"): 128 * KIB,
    ("llama-3-70b", "bf16"): 320 * KIB,
    # Kimi K3 report, arXiv 2607.24653: 24 layers × 576 values.
    ("kimi-k3", "bf16"): 27_648,
    # DeepSeek-V2: (512 + 64) values a token and layer; 60 layers.
    ("deepseek-v2", "bf16"): 60 * 576 * 2,
    ("deepseek-v3", "bf16"): 61 * 576 * 2,
    # FlashMLA: 656 B a token and layer; the indexer adds 128 codes and one float32 scale.
    ("deepseek-v3", "fp8"): 61 * 656,
    ("deepseek-v3.2", "fp8"): 61 * (656 + 132),
}


@pytest.mark.parametrize("case", PUBLISHED_PER_TOKEN)
def test_published_bytes_a_token(case):
    assert per_token(*case) == PUBLISHED_PER_TOKEN[case]


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "deepseek-v3.2", "kimi-k2", "glm-5"])
def test_latents_are_576_values(name):
    (tensor,) = architecture(name).group("latent").tensors
    assert (tensor.heads, tensor.width) == (1, 512 + 64)


def test_kimi_k3_states():
    """6 MiB a KDA layer and 414 MiB in all; the convolutions come on top."""
    group = architecture("kimi-k3").group("kda")
    recurrent, convolution = group.states
    assert recurrent.bytes == 6 * MIB and len(group.layers) * recurrent.bytes == 414 * MIB
    assert convolution.bytes == 3 * 96 * 128 * 3 * 2
    assert sizes("kimi-k3")["kda"].state_bytes == 69 * (recurrent.bytes + convolution.bytes)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_deepseek_v4_blocks(name):
    """Report, section 3.5.1: 128 tokens are 32 CSA entries, with their indexer keys, and one HCA entry of 584 B."""
    v4 = sizes(name, "fp8")
    csa, hca = v4["csa"], v4["hca"]
    assert 128 // csa.group.tokens_per_entry == 32 and 128 // hca.group.tokens_per_entry == 1
    assert hca.entry_bytes == 584 and csa.entry_bytes == 584 + 132
    assert csa.page_bytes(128) == len(csa.group.layers) * 32 * (584 + 132)
    assert hca.page_bytes(128) == len(hca.group.layers) * 584
    # The window is a ring of 128 entries that every sequence holds from its start, whatever its length.
    assert v4["window"].state_bytes == len(v4["window"].group.layers) * 128 * 584 and v4["window"].bytes_per_token == 0
    # Tails: values and scores as float32, two windows of 4 for CSA (main and indexer), one of 128 for HCA.
    assert csa.state_bytes == len(csa.group.layers) * 2 * 4 * (8 * 1024 + 8 * 256)
    assert hca.state_bytes == len(hca.group.layers) * 2 * 4 * 128 * 512
    with pytest.raises(ValueError, match="multiple of 128"):
        hca.page_bytes(64)


def test_v4_against_v3_2_at_a_million_tokens():
    """The report: 10 % of V3.2's KV for Pro and 7 % for Flash at 1M tokens; its indexer keys are fp4, 68 B each."""
    million = 2**20

    def held(name, indexer="fp8"):
        total = 0
        for group in architecture(name).groups:
            tensors = (replace(one, format=indexer) if one.name == "indexer_key" else one for one in group.tensors)
            (one,) = group_sizes([replace(group, tensors=tuple(tensors))], "fp8")
            total += one.sequence_bytes(million, 128)
        return total

    assert FORMATS["mxfp4"].row_bytes(128) == 68
    assert held("deepseek-v4-pro", "mxfp4") / held("deepseek-v3.2") == pytest.approx(0.10, abs=0.006)
    assert held("deepseek-v4-flash", "mxfp4") / held("deepseek-v3.2") == pytest.approx(0.07, abs=0.006)
    assert held("deepseek-v4-pro") > held("deepseek-v4-pro", "mxfp4")


def test_gemma_3_and_gpt_oss_past_their_windows():
    gemma = sizes("gemma-3-27b")
    layer = 2 * 16 * 128 * 2
    assert gemma["full"].bytes_per_token == 10 * layer and gemma["window"].bytes_per_token == 52 * layer
    # At 32,768 tokens the 52 windowed layers hold 1,024 tokens each, in at most 65 pages of 16.
    assert gemma["window"].kept_tokens(32768) == 1024 and gemma["window"].pages(32768, 16) == 65
    assert gemma["window"].sequence_bytes(32768, 16) == 65 * 16 * 52 * layer
    assert gemma["full"].sequence_bytes(32768, 16) == 32768 * 10 * layer
    oss = sizes("gpt-oss-20b")
    assert oss["full"].bytes_per_token == 12 * 2 * 8 * 64 * 2 == oss["window"].bytes_per_token
    assert oss["window"].pages(131072, 16) == 9 and oss["full"].pages(131072, 16) == 8192


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 128, 2047])
@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_window_pages_are_the_most_that_any_moment_needs(window, page_size):
    """Against a count token by token: positions (t − window, t] touch pages, and page tables hold whole pages."""
    one = sizes("mistral-7b")["window"]
    one = replace(one, group=replace(one.group, window=window))
    most = 0
    for length in range(1, window + 3 * page_size + 2):
        first = max(0, length - window) // page_size
        most = max(most, -(-length // page_size) - first)
        assert one.pages(length, page_size) >= most
    assert one.pages(10 * (window + page_size), page_size) == most


def test_chunks_empty_at_every_multiple():
    chunk = sizes("llama-4-scout")["chunk"]
    assert [chunk.kept_tokens(tokens) for tokens in (0, 1, 8192, 8193, 16384, 20000)] == [0, 1, 8192, 1, 8192, 3616]
    assert chunk.pages(10**6, 16) == 8192 // 16


def test_multi_query_and_multi_head_attention():
    heads = {"gemma-3-270m": 1, "phi-2": 32, "qwen2-7b": 4}
    for name, number in heads.items():
        model = architecture(name)
        width = model.groups[0].tensors[0].width
        assert model.groups[0].tensors[0].heads == number
        assert per_token(name) == 2 * model.num_layers * number * width * 2


def test_formats_store_their_scales():
    """Bytes of a row of 128 elements, counted by hand."""
    row = {name: (form.row_bytes(128), form.row_bytes(128, values=True)) for name, form in FORMATS.items()}
    assert row["bf16"] == (256, 256) and row["fp32"] == (512, 512) and row["fp8"] == (128, 128)
    assert row["int8"] == (128 + 4, 128 + 4)
    assert row["int4"] == (64 + 4 * 4, 64 + 4 * 4)
    assert row["nvfp4"] == (64 + 8, 64 + 8)
    # KIVI: keys share a scale and zero over 32 tokens for each of 128 channels; values over 32 lanes.
    assert row["kivi2"] == (32 + Fraction(128 * 4, 32), 32 + 4 * 4)


def test_kivi_keeps_128_tokens_exact():
    (kivi,) = sizes("llama-2-7b", "kivi2").values()
    assert kivi.exact_bytes(50) == 50 * 512 * KIB and kivi.exact_bytes(4096) == 128 * 512 * KIB


@pytest.mark.parametrize(("bits", "ratio"), [(4, 3.7), (3, 4.8), (2, 6.9)])
def test_kvquant_compresses_as_published(bits, ratio):
    """KVQuant, table 1: 3.7, 4.8 and 6.9 times with 1 % outliers, on LLaMA-7B."""
    assert per_token("llama-2-7b") / per_token("llama-2-7b", f"kvquant{bits}") == pytest.approx(ratio, abs=0.06)


def test_tensor_parallelism_divides_only_what_is_sharded():
    def on(name, tensor, kv_format="bf16"):
        return per_token(name, kv_format, parallel=Parallelism(tensor=tensor))

    assert [on("llama-3-8b", n) / KIB for n in (1, 2, 4, 8)] == [128, 64, 32, 16]
    assert on("llama-3-8b", 16) == on("llama-3-8b", 8)  # eight heads: each is on two devices
    assert on("deepseek-v3", 8) == on("deepseek-v3", 1)  # latents are whole everywhere
    assert on("deepseek-v4-pro", 8, "fp8") == on("deepseek-v4-pro", 1, "fp8")
    assert on("gemma-3-270m", 4) == on("gemma-3-270m", 1)  # multi-query
    with pytest.raises(ValueError, match=r"3 does not divide the 8 heads of full\.k"):
        on("llama-3-8b", 3)
    states = [sizes("kimi-k3", parallel=Parallelism(tensor=n))["kda"].state_bytes for n in (1, 8)]
    assert states[0] == 8 * states[1]


def test_context_parallelism_deals_out_pages_of_groups_that_grow():
    one, four = (sizes("gpt-oss-20b", parallel=Parallelism(context=n)) for n in (1, 4))
    assert one["full"].pages(4096, 16) == 256 and four["full"].pages(4096, 16) == 64
    assert four["full"].pages(17, 16) == 1
    assert four["window"].pages(4096, 16) == one["window"].pages(4096, 16)


def test_pipeline_stages_share_out_the_layers():
    model = architecture("gpt-oss-20b")
    for stages in (1, 2, 5, 24):
        cut = Parallelism(pipeline=stages).stages(model.groups, model.num_layers)
        layers = sorted(layer for stage in cut for group in stage for layer in group.layers)
        assert len(cut) == stages and layers == list(range(24))
    with pytest.raises(ValueError, match="exceeds the model's 24 layers"):
        Parallelism(pipeline=25).stages(model.groups, model.num_layers)


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_parallelism_is_a_positive_integer(number):
    with pytest.raises(ValueError, match="tensor parallelism"):
        Parallelism(tensor=number)


def test_tpu_rows_are_padded_to_lanes():
    """576 becomes 640 lanes; 64 + 64 fills 128 without padding; 96 + 96 becomes 256."""
    padding = {name: next(iter(sizes(name, platform="tpu").values())).padding for name in NAMES}
    assert padding["deepseek-v3"] == Fraction(640, 576)
    assert padding["gpt-oss-20b"] == padding["llama-3-8b"] == 1
    assert padding["phi-3-mini-4k"] == Fraction(256, 192)
    assert all(one.padding == 1 for name in NAMES for one in sizes(name).values())


def test_weight_formats():
    assert weight_bytes(1000, "bf16") == 2000 and weight_bytes(1024, "mxfp4") == 1024 * 17 // 32
    with pytest.raises(ValueError, match="'int3' is not known; known: fp32, bf16"):
        weight_bytes(1, "int3")
    with pytest.raises(ValueError, match="'int3' is not known; known: fp32, bf16"):
        sizes("llama-3-8b", "int3")
    with pytest.raises(ValueError, match="platform='npu'"):
        sizes("llama-3-8b", platform="npu")
