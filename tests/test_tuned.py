"""Tuned block sizes: what is written is read, reaches the kernels, and is refused where it does not belong."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from absl import flags

import kvjax
from experiments import tune_blocks
from experiments.decode_cases import Heads
from kvjax.attention import load_tuned
from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.gpu import attend_items
from pallas_kernels.gpu import block_rule as gpu_rule
from pallas_kernels.gpu import paged_attention as on_gpu
from pallas_kernels.hardware import H100, H200, TPU_V5E, TPU_V6E
from pallas_kernels.tpu import attend_tiles
from pallas_kernels.tpu import block_rule as tpu_rule
from pallas_kernels.tpu import paged_attention as on_tpu
from pallas_kernels.tuned import Tuned, TunedFileError, as_record, with_tuned

HEADS = Heads(8, 2, 128)
SHAPE = tune_blocks.decode_shape(HEADS, 16)
ON_TPU = Tuned("v6e", SHAPE, (("pages_per_block", 64), ("buffers", 8)))
ON_GPU = Tuned("h200", SHAPE, (("workers", 7), ("consumers", 1), ("buffers", 3)))
SPEC = kvjax.CacheSpec.uniform(layers=1, kv_heads=2, head_dim=128)


def trace(kernel, facts, tokens=1):
    """The kernel on abstract arguments of SHAPE, with so many tokens a tile."""
    struct = jax.ShapeDtypeStruct
    per_tile = struct((3,), jnp.int32)
    jax.eval_shape(
        lambda q, pool, pages, tiles, offset: kernel.paged_attention(
            q, pool, pages, tiles, offset, attention=Attention(value_dim=128, scale=1.0), facts=facts
        ),
        struct((3, tokens, HEADS.q, 128), jnp.bfloat16),
        struct((10, 2, 16, 256), jnp.bfloat16),
        struct((3, 128), jnp.int32),
        Tiles(per_tile, per_tile, per_tile),
        struct((), jnp.int32),
    )


@pytest.mark.parametrize(
    ("kernel", "facts", "tuned", "sizes"),
    [
        (on_tpu, TPU_V6E, ON_TPU, {"pages_per_block": 64, "buffers": 8}),
        (on_gpu, H200, ON_GPU, {"consumers": 1, "buffers": 3}),
    ],
    ids=["tpu", "gpu"],
)
def test_a_kernel_takes_the_sizes_of_its_shape_and_of_no_other(kernel, facts, tuned, sizes, monkeypatch):
    asked, schedules = [], []
    module = attend_items if kernel is on_gpu else attend_tiles
    choose = module.choose_blocks
    monkeypatch.setattr(module, "choose_blocks", lambda *shape, **sizes: asked.append(sizes) or choose(*shape, **sizes))
    if kernel is on_gpu:
        make = module.make_schedule
        monkeypatch.setattr(module, "make_schedule", lambda *args: schedules.append(args[-1]) or make(*args))
    facts = with_tuned(facts, [tuned])
    trace(kernel, facts)
    trace(kernel, facts, tokens=2)
    assert asked == [sizes, {}] and schedules in ([], [7, 132])


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"device": "any", "records": [], **as_record(ON_GPU)}))
    assert load_tuned(file) == ON_GPU
    assert kvjax.init(SPEC, rows=1, num_pages=4, max_context=64, backend=H200, tuned=[ON_GPU]).backend.tuned == (
        ON_GPU,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chip": None}, "chip must be str, got None"),
        ({"sizes": {"workers": "7"}}, "sizes.workers must be int, got '7'"),
        ({"shape": {**as_record(ON_GPU)["shape"], "lines": True}}, "shape.lines must be int, got True"),
        ({"shape": []}, r"shape must be dict, got \[\]"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_used_is_refused_by_field(tmp_path, change, message):
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(as_record(ON_GPU) | change))
    with pytest.raises(TunedFileError, match=f"{file}: {message}"):
        load_tuned(file)
    file.write_text("{")
    with pytest.raises(TunedFileError, match=f"{file}: not JSON"):
        load_tuned(file)


@pytest.mark.parametrize(
    ("backend", "tuned", "message"),
    [
        (H100, ON_GPU, "tuned on 'h200' are not for 'h100'"),
        (TPU_V6E, replace(ON_GPU, chip="v6e"), r"the kernel of v6e takes \['buffers', 'pages_per_block'\]"),
        ("xla", ON_GPU, 'backend="xla", which has none'),
        (
            H200,
            replace(ON_GPU, shape=replace(SHAPE, page_size=64)),
            "'page_size': 64.*'page_size': 16.*tune for its own",
        ),
    ],
    ids=["chip", "names", "xla", "shape"],
)
def test_sizes_that_do_not_belong_to_a_cache_are_refused_by_name(backend, tuned, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init(SPEC, rows=1, num_pages=4, max_context=64, backend=backend, tuned=[tuned])


def test_sizes_that_the_rule_does_not_allow_do_not_reach_a_compiler():
    for sizes, message in (((48, 4), "pages_per_block=48"), ((64, 3), "buffers=3; choose one of")):
        tuned = replace(ON_TPU, sizes=tuple(zip(("pages_per_block", "buffers"), sizes, strict=True)))
        with pytest.raises(ValueError, match=message):
            trace(on_tpu, with_tuned(TPU_V6E, [tuned]))
    for sizes, message in (((0, 1, 3), "workers=0"), ((132, 2, 3), "consumers=2, buffers=3 are not to be had")):
        tuned = replace(ON_GPU, sizes=tuple(zip(("workers", "consumers", "buffers"), sizes, strict=True)))
        with pytest.raises(ValueError, match=message):
            trace(on_gpu, with_tuned(H200, [tuned]))


@pytest.mark.parametrize(("rule", "facts"), [(tpu_rule, TPU_V5E), (gpu_rule, H200)], ids=["tpu", "gpu"])
def test_every_candidate_is_taken_and_the_rules_own_choice_is_one(rule, facts):
    for shape in (SHAPE, replace(SHAPE, key_dim=256, value_dim=256), replace(SHAPE, page_size=128, lines=64)):
        allowed = rule.allowed_sizes(shape, facts)
        if rule is tpu_rule:
            chosen = rule.choose_blocks(shape, facts)
            assert {"pages_per_block": chosen.pages, "buffers": chosen.buffers} in allowed
        else:
            chosen = rule.choose_blocks(shape.key_dim, shape.value_dim, "bfloat16", "bfloat16", 0, facts)
            own = {"consumers": chosen.consumers, "buffers": chosen.buffers}
            assert {"workers": 132, **own} in allowed


def test_the_dry_run_checks_candidates_and_chooses_nothing(capsys):
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["tune_blocks", "--dry_run"])
    try:
        assert tune_blocks.main(["tune_blocks"]) == 0
    finally:
        flags.FLAGS.unparse_flags()
    said = capsys.readouterr().out
    assert "nothing is chosen" in said and "best" not in said and "µs" not in said
    assert said.count("error") == 4 and "WRONG" not in said


def test_the_fastest_of_the_right_ones_is_chosen():
    right = {"right": True, "sizes": {"buffers": 4}, "seconds": 2.0}
    wrong, untimed = right | {"right": False, "seconds": 1.0}, {"right": True, "sizes": {}}
    rule = right | {"sizes": None, "seconds": 0.5}
    slower = right | {"seconds": 3.0}
    assert tune_blocks.best([rule, wrong, untimed, slower, right]) == right
    assert tune_blocks.best([wrong, untimed]) is None


def test_a_tuning_run_writes_what_a_cache_takes(tmp_path, monkeypatch):
    """On a device that is made up, whose times are those of this table."""
    monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])

    def measure(candidate, batch, heads, page_size, *, timed):
        best = candidate.name == "workers=132 consumers=2 buffers=2"
        return {"kernel": candidate.name, "right": True, "error": 0.0, "seconds": 1.0 if best else 2.0}

    monkeypatch.setattr(tune_blocks, "measure", measure)
    file = tmp_path / "tuned.json"
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["tune_blocks", "--heads=8:2x128", f"--json={file}"])
    try:
        assert tune_blocks.main(["tune_blocks"]) == 0
    finally:
        flags.FLAGS.unparse_flags()
    assert load_tuned(file) == Tuned("h200", SHAPE, (("workers", 132), ("consumers", 2), ("buffers", 2)))
    written = json.loads(file.read_text())
    assert {"jax", "jaxlib", "command", "records", "batch"} <= written.keys() and len(written["records"]) > 10
