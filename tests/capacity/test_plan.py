"""Plans: what is left is what the ledger says, pages and sequences fit in it, and advice follows the numbers."""

from dataclasses import replace

import pytest

from kvjax.capacity import (
    Deployment,
    Draft,
    ExecutableMemory,
    Parallelism,
    Weights,
    Workload,
    advise,
    make_plan,
    weight_bytes,
)
from tests.capacity.configs import NAMES, architecture

GB = 10**9


def deployment(name="llama-3-8b", hbm=80 * GB, context=8192, **more):
    model = architecture(name)
    number = model.parameters or 48 * GB
    weights = Weights(weight_bytes(number, "fp8"), number, "fp8", "test")
    return Deployment(model, weights, hbm, context, kv_format=more.pop("kv_format", model.kv_format), **more)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_model_s_ledger_closes(name, platform):
    """Lines add up to no more than the memory, and what remains would not hold one sequence more."""
    plan = make_plan(deployment(name, hbm=1200 * GB, context=32768, platform=platform))
    assert plan.max_sequences > 0 and plan.shortfall == 0
    assert all(line.bytes >= 0 and line.formula and line.source for line in plan.ledger.lines)
    rest = 1200 * GB - plan.ledger.total
    assert 0 <= rest < 2 * plan.sequence_bytes(32768) + 2**20
    assert plan.ledger.bytes_of("kv_pool", "alignment_padding", "copy_on_write_headroom") == plan.pool_bytes
    assert plan.sequences_of(32768) == plan.max_sequences
    for length in (1, 500, 4096):
        again = make_plan(replace(plan.deployment, lengths=[length], page_size=plan.page_size))
        assert plan.sequences_of(length) == again.max_sequences and again.ledger.total <= again.deployment.hbm
    for group in plan.groups:
        if group.sizes.group.paged:  # all sequences at their longest, and a page each to copy on
            assert group.num_pages >= plan.max_sequences * (group.sizes.pages(32768, plan.page_size) + 1)


def test_a_plan_by_hand():
    """Llama-3-8B on 80 GB: every line recomputed."""
    plan = make_plan(deployment(page_size=16, chunk=1024, slack=0.1))
    lines = {line.name: line.bytes for line in plan.ledger.lines}
    rows = plan.max_sequences
    assert lines["weights"] == 8_030_261_248
    assert lines["allocator_slack"] == 8 * GB
    assert lines["transient"] == 1024 * (6 * 4096 + 2 * 14336) * 2 + rows * 128256 * 4 * 3
    assert lines["workspace"] == rows * 32 * 16 * 130 * 4
    assert lines["copy_on_write_headroom"] == rows * 16 * 131072
    assert lines["page_tables"] == 4 * (rows * 512 + 2 * rows + 3 + 16) + 4 * (2 * rows + 3) + 12 * plan.num_pages
    assert plan.pool_bytes == plan.num_pages * 16 * 131072
    assert plan.bytes_per_token == 131072 and plan.state_bytes_per_sequence == 0
    assert lines["states"] == lines["alignment_padding"] == lines["transfer_staging"] == 0
    left = 80 * GB - sum(lines[one] for one in ("weights", "allocator_slack", "transient", "workspace", "executable"))
    assert rows == left // (513 * (16 * 131072 + 12) + 4 * (512 + 2) + 8)


def test_windows_hold_more_sequences_than_full_attention():
    windowed = make_plan(deployment("gpt-oss-20b", context=131072))
    full = replace(
        windowed.deployment.architecture,
        groups=tuple(replace(group, window=None) for group in windowed.deployment.architecture.groups),
    )
    assert windowed.max_sequences > 1.9 * make_plan(replace(windowed.deployment, architecture=full)).max_sequences
    assert windowed.growth_per_token * 2 == windowed.bytes_per_token


def test_padding_on_tpu_is_a_line_of_its_own():
    plan = make_plan(deployment("deepseek-v3", hbm=1000 * GB, platform="tpu"))
    pool = plan.ledger.bytes_of("kv_pool", "alignment_padding")
    assert plan.ledger.bytes_of("alignment_padding") == pytest.approx(pool / 10, rel=1e-3)  # 576 of 640 lanes
    assert make_plan(deployment("deepseek-v3", hbm=1000 * GB)).ledger.bytes_of("alignment_padding") == 0


def test_parallelism_divides_weights_and_what_is_sharded():
    one = make_plan(deployment("llama-3-70b", hbm=160 * GB))
    four = make_plan(deployment("llama-3-70b", hbm=160 * GB, parallel=Parallelism(tensor=4)))
    assert four.bytes_per_token * 4 == one.bytes_per_token
    assert four.ledger.bytes_of("weights") == one.ledger.bytes_of("weights") // 4
    latent = make_plan(deployment("deepseek-v3", hbm=1000 * GB, parallel=Parallelism(tensor=8)))
    assert latent.bytes_per_token == 61 * 576 * 2
    staged = make_plan(deployment("llama-3-70b", hbm=160 * GB, parallel=Parallelism(pipeline=3)))
    assert staged.bytes_per_token == 27 * 4096  # 80 layers: 26, 27, 27
    assert staged.ledger.bytes_of("weights") == -(-70_553_706_496 * 27 // 80)
    copies = make_plan(deployment("llama-3-70b", hbm=160 * GB, parallel=Parallelism(data=2)))
    assert copies.max_sequences == one.max_sequences and copies.ledger == one.ledger
    dealt = make_plan(deployment("llama-3-70b", hbm=160 * GB, parallel=Parallelism(context=4)))
    assert dealt.max_sequences > 3.8 * one.max_sequences


def test_a_draft_model_caches_the_same_tokens():
    small = architecture("gemma-3-270m")
    draft = Draft(small, Weights(weight_bytes(small.parameters, "bf16"), small.parameters, "bf16", "test"))
    alone, both = make_plan(deployment()), make_plan(deployment(draft=draft))
    assert both.bytes_per_token == alone.bytes_per_token + 18 * 2 * 256 * 2
    assert both.ledger.bytes_of("draft_weights") == 2 * 268_098_176
    assert both.max_sequences < alone.max_sequences
    assert [group.sizes.group.name for group in both.groups] == ["full", "draft.window", "draft.full"]
    staged = make_plan(deployment(draft=draft, parallel=Parallelism(pipeline=2)))
    assert staged.ledger.bytes_of("draft_weights") == 2 * 268_098_176  # whole beside one stage


def test_quantised_caches_hold_more():
    held = {
        name: make_plan(deployment(kv_format=name, page_size=32)).max_sequences for name in ("bf16", "fp8", "kivi2")
    }
    assert held["bf16"] < held["fp8"] < held["kivi2"]
    kivi = make_plan(deployment(kv_format="kivi2", page_size=32))
    assert kivi.ledger.bytes_of("states") == kivi.max_sequences * 128 * 131072  # the exact tokens


def test_a_trace_is_planned_for_its_mean():
    plan = make_plan(deployment(lengths=[100, 200, 600]))
    assert plan.planned_length == 300 and plan.max_sequences > make_plan(deployment()).max_sequences
    assert make_plan(deployment(lengths=[10**6])).planned_length == 8192  # cut at the context


def test_what_does_not_fit_says_how_much_is_missing():
    plan = make_plan(deployment("llama-3-70b", hbm=70 * GB))
    assert plan.max_sequences == 0 and plan.num_pages == 0 and plan.shortfall > 0
    enough = make_plan(deployment("llama-3-70b", hbm=int((70 * GB + plan.shortfall) / 0.95) + 2**26))
    assert enough.max_sequences >= 1


def test_a_measured_executable_replaces_what_was_predicted():
    measured = ExecutableMemory(arguments=5, outputs=7 * 2**20, aliased=2**20, temporaries=3 * 2**20, code=11)
    assert measured.peak == 5 + 9 * 2**20 + 11
    plan = make_plan(deployment(executable=measured))
    assert plan.ledger.bytes_of("transient") == 9 * 2**20 and plan.ledger.bytes_of("executable") == 11
    assert sum(line.name == "transient" for line in plan.ledger.lines) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hbm": 0}, "hbm=0"),
        ({"context": 0}, "context=0"),
        ({"slack": 1.0}, "slack=1.0"),
        ({"kv_format": "int3"}, "'int3' is not known"),
        ({"parallel": Parallelism(tensor=3)}, "does not divide the 8 heads"),
        ({"parallel": Parallelism(pipeline=33)}, "exceeds the model's 32 layers"),
        ({"platform": "npu"}, "platform='npu'"),
        ({"name": "deepseek-v4-pro", "page_size": 16, "hbm": 1000 * GB}, "page_size=16 must be a multiple of"),
    ],
)
def test_sizes_that_do_not_go_together(more, message):
    with pytest.raises(ValueError, match=message):
        make_plan(deployment(**more))


def choices(plan, workload=None):
    return {one.topic: one.choice for one in advise(plan, workload or Workload())}


def reasons(plan, workload):
    return {one.topic: one.reason for one in advise(plan, workload)}


def test_advice_for_a_single_short_request():
    plan = make_plan(deployment(lengths=[700]))
    single = choices(plan, Workload(lengths=[700], prompts=[500]))
    assert single["layout"] == "contiguous" and single["prefix_index"] == single["remote_tier"] == "no"
    assert single["eviction"] == "no"


def test_advice_on_prefixes_follows_repetition():
    plan = make_plan(deployment(lengths=[4000] * 50))

    def asked(shared):
        return Workload(lengths=[4000] * 50, prompts=[3000] * 50, shared=shared, network=25e9, prefill_rate=10_000)

    low, high = asked([0] * 48 + [3000] * 2), asked([0] + [2400] * 49)
    assert choices(plan, low)["prefix_index"] == "no" and "4.0 %" in reasons(plan, low)["prefix_index"]
    assert choices(plan, low)["remote_tier"] == "no"
    assert choices(plan, high)["prefix_index"] == "yes" and choices(plan, high)["layout"] == "paged"
    unknown = replace(low, shared=None)
    assert choices(plan, unknown)["prefix_index"] == "unknown"


def test_advice_on_a_remote_tier_compares_network_and_prefill():
    plan = make_plan(deployment(lengths=[4000] * 9))
    fast = Workload(lengths=[4000] * 9, prompts=[9] * 9, shared=[9] * 9, network=25e9, prefill_rate=10_000)
    assert choices(plan, fast)["remote_tier"] == "yes"  # 25 GB/s over 128 KiB is 190,735 tokens/s
    assert "190735" in reasons(plan, fast)["remote_tier"]
    slow = replace(fast, network=0.125e9)
    assert choices(plan, slow)["remote_tier"] == "no" and "954 tokens/s" in reasons(plan, slow)["remote_tier"]
    assert choices(plan, replace(fast, network=None))["remote_tier"] == "unknown"


def test_lossy_caches_wait_for_an_evaluation():
    plan = make_plan(deployment())
    wanted = Workload(concurrency=4 * plan.max_sequences)
    assert choices(plan, wanted)["quantisation"] == choices(plan, wanted)["eviction"] == "not yet"
    evaluated = replace(wanted, quality_evaluated=True)
    assert choices(plan, evaluated)["quantisation"] == "fp8" and choices(plan, evaluated)["eviction"] == "yes"
    few = Workload(concurrency=2, quality_evaluated=True)
    assert choices(plan, few)["quantisation"] == choices(plan, few)["eviction"] == "no"


def test_advice_on_layouts():
    long = make_plan(deployment("llama-3-8b", context=131072, hbm=141 * GB))
    assert choices(long)["layout"] == "virtual"  # 64 MiB of half units against 16 GiB a sequence
    assert choices(make_plan(deployment(lengths=[500] * 9)))["layout"] == "paged"
    assert choices(make_plan(deployment("mamba2-2.7b")))["layout"] == "contiguous"
    assert choices(make_plan(deployment("gpt-oss-20b", context=131072)))["layout"] == "paged"


def test_a_virtual_layout_grows_by_a_granule_for_each_tensor():
    """Latent attention caches one tensor a layer, K and V two."""
    for name, tensors in (("deepseek-v2", 60), ("llama-3-8b", 64)):
        plan = make_plan(deployment(name, context=8192, hbm=2000 * GB))
        (layout,) = (one for one in advise(plan, Workload()) if one.topic == "layout")
        assert layout.numbers["growth_unit_bytes"] == tensors * 2 * 2**20


def test_advice_on_eviction_where_nothing_grows():
    assert "evict by themselves" in reasons(make_plan(deployment("mistral-7b")), Workload())["eviction"]


def test_advice_on_page_sizes_names_the_costs_of_what_was_asked():
    plan = make_plan(deployment(page_size=1))
    (advice,) = (one for one in advise(plan, Workload()) if one.topic == "page_size")
    assert advice.choice == "1" and "as asked for, costs 100." in advice.reason
