"""`kvjax plan` as its users meet it: real configs in every form, and one-line complaints about everything else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvjax import cli
from kvjax.commands.plan import byte_rate, byte_size
from kvjax.models.smollm2 import smollm2_path
from tests.capacity.configs import DIRECTORY, config

TEN = {
    # Name, and the flags without which it does not fit or its weights are not known.
    "llama-3-8b": (),
    "llama-3-70b": ("--tp", "4"),
    "mistral-7b": (),
    "qwen3-30b-a3b": (),
    "gemma-3-27b": ("--tp", "2"),
    "gpt-oss-120b": ("--weights", "mxfp4"),
    "deepseek-v3": ("--tp", "16", "--kv-dtype", "fp8"),
    "deepseek-v4-flash": ("--tp", "8", "--parameters", "284e9", "--weights", "fp8"),
    "kimi-k3": ("--tp", "64", "--parameters", "2e12", "--weights", "int4", "--context", "262144"),
    "jamba-v0.1": ("--tp", "2", "--parameters", "51.6e9"),
    "opt-13b": (),
}
FIELDS = "bytes_per_token state_bytes_per_sequence pool_bytes num_pages page_size max_sequences ledger groups"


@pytest.fixture
def run(capsys):
    """Runs the command; returns exit status, stdout, and lines of stderr."""

    def run(*arguments):
        try:
            status = cli.main(["plan", *(str(argument) for argument in arguments)])
        except SystemExit as exit:
            status = exit.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err.splitlines()

    return run


@pytest.mark.parametrize("name", TEN)
def test_real_configs(run, name):
    status, out, err = run(DIRECTORY / f"{name}.json", "--hbm", "80GB", *TEN[name], "--json")
    assert (status, err) == (0, [])
    plan = json.loads(out)
    assert set(FIELDS.split()) <= set(plan)
    assert plan["max_sequences"] > 0 and plan["num_pages"] > 0
    assert plan["bytes_per_token"] == sum(group["bytes_per_token"] for group in plan["groups"])
    assert plan["num_pages"] == sum(group["num_pages"] for group in plan["groups"])
    assert plan["pool_bytes"] == sum(group["num_pages"] * group["page_bytes"] for group in plan["groups"])
    assert sum(line["bytes"] for line in plan["ledger"]) <= 80 * 10**9
    assert all(line["formula"] and line["source"] for line in plan["ledger"])
    assert {"field": "model_type", "value": config(name)["model_type"], "use": "family", "given": True} in plan[
        "fields"
    ]


@pytest.mark.parametrize("name", TEN)
def test_reports_of_real_configs(run, name):
    status, out, err = run(DIRECTORY / f"{name}.json", "--hbm", "80GB", *TEN[name], "--advise")
    assert (status, err) == (0, [])
    for word in (config(name)["model_type"], "max sequences", "kv_pool", "█", "limit", "num_hidden_layers", "layout: "):
        assert word in out


def test_the_report_and_the_record_say_the_same(run):
    command = (DIRECTORY / "llama-3-8b.json", "--hbm", "80GB", "--page-size", "16", "--context", "8192")
    plan = json.loads(run(*command, "--json")[1])
    assert (plan["bytes_per_token"], plan["page_size"]) == (131072, 16)
    assert plan["pool_bytes"] == plan["num_pages"] * 16 * 131072
    out = run(*command)[1]
    assert f"{plan['num_pages']} pages of 16 tokens" in out and f"{plan['max_sequences']} of 8192 tokens" in out


def test_a_directory_and_a_gguf_file_are_configs_too(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("llama-2-7b")))
    plan = json.loads(run(tmp_path, "--hbm", "24GiB", "--json")[1])
    assert plan["bytes_per_token"] == 512 * 1024
    status, out, err = run(smollm2_path(), "--hbm", "1GB", "--kv-dtype", "fp32", "--json")
    plan = json.loads(out)
    assert (status, err, plan["bytes_per_token"]) == (0, [], 2 * 30 * 3 * 64 * 4)
    weights = next(line for line in plan["ledger"] if line["name"] == "weights")
    assert weights["bytes"] < smollm2_path().stat().st_size and weights["source"] == "sizes of the file's tensors"


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_the_weights_dtype_may_stand_in_the_text_config(run, tmp_path, dtype):
    given = {**config("gemma-3-27b"), "torch_dtype": None}
    given["text_config"]["dtype"] = dtype
    (tmp_path / "config.json").write_text(json.dumps(given))
    plan = json.loads(run(tmp_path, "--hbm", "300GB", "--json")[1])
    weights = next(line for line in plan["ledger"] if line["name"] == "weights")
    assert "weights in fp32" in weights["formula"] and f"config dtype {dtype}" in weights["source"]


def test_a_trace_decides_lengths_pages_and_advice(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"prompt_tokens": 900, "output_tokens": 100, "shared_prefix_tokens": 800}] * 40 + [{"length": 200}, 300]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = (DIRECTORY / "llama-3-8b.json", "--hbm", "80GB", "--trace", trace, "--advise")
    plan = json.loads(run(*command, "--json")[1])
    assert plan["planned_length"] == -(-(40 * 1000 + 500) // 42)
    advice = {one["topic"]: one for one in plan["advice"]}
    assert advice["prefix_index"]["choice"] == "yes"
    assert advice["prefix_index"]["numbers"]["repetition"] == pytest.approx(40 * 800 / (40 * 900 + 500))
    knees = [cost["page_size"] for cost in plan["page_sizes"] if cost["knee"]]
    assert knees == [plan["page_size"]] == [64]
    assert "the trace uses" in run(*command)[1]


def test_what_does_not_fit_is_a_plan_all_the_same(run):
    status, out, err = run(DIRECTORY / "llama-3-70b.json", "--hbm", "80GB", "--json")
    plan = json.loads(out)
    assert (status, len(err), plan["max_sequences"]) == (1, 1, 0) and plan["limit"] in err[0]
    assert plan["shortfall_bytes"] > 0 and plan["limit"].startswith("memory: ")
    status, out, _ = run(DIRECTORY / "llama-3-70b.json", "--hbm", "80GB")
    assert status == 1 and "limit" in out and "more" in out


def test_the_picture(run, tmp_path):
    picture = tmp_path / "sub" / "plan.png"
    status, _, err = run(DIRECTORY / "gpt-oss-20b.json", "--hbm", "80GB", "--png", picture)
    assert (status, err) == (0, []) and picture.stat().st_size > 10_000
    (tmp_path / "file").write_text("")
    status, _, err = run(DIRECTORY / "gpt-oss-20b.json", "--hbm", "80GB", "--png", tmp_path / "file" / "plan.png")
    assert status == 1 and len(err) == 1 and "--png" in err[0]


def test_a_draft_model_and_a_remote_tier(run):
    draft = ("--draft", DIRECTORY / "llama-3-8b.json", "--network", "25GB/s", "--prefill-rate", "20000")
    out = run(DIRECTORY / "llama-3-70b.json", "--hbm", "80GB", "--tp", "8", *draft, "--json", "--advise")[1]
    lines = {line["name"]: line["bytes"] for line in json.loads(out)["ledger"]}
    assert lines["draft_weights"] == 8_030_261_248 * 2 // 8 and lines["transfer_staging"] > 0


NONSENSE = {
    "no file": ("missing.json", None, ()),
    "not JSON": ("is not JSON", "{", ()),
    "not text": ("is not", b"\xff\xfe\x00", ()),
    "a list": ("holds a JSON list", "[]", ()),
    "empty": ("model_type=None is not supported", "{}", ()),
    "unknown family": ("model_type='rwkv7' is not supported; known:", {"model_type": "rwkv7"}, ()),
    "missing field": ("no field 'num_attention_heads'", {"model_type": "llama"}, ()),
    "unknown field": (
        "'num_kv_shared_layers' = 4 is not known",
        {**config("llama-3-8b"), "num_kv_shared_layers": 4},
        (),
    ),
    "heads over devices": ("does not divide the 8 heads", config("llama-3-8b"), ("--tp", "3")),
    "layers over stages": ("exceeds the model's 32 layers", config("llama-3-8b"), ("--pp", "40")),
    "broken entries": (
        "page_size=16 must be a multiple of",
        config("deepseek-v4-pro"),
        ("--page-size", "16", "--parameters", "1e9"),
    ),
    "weights not counted": ("pass --parameters", config("deepseek-v4-pro"), ()),
    "weights in an unknown format": (
        "quant_method='awq'",
        {**config("llama-3-8b"), "quantization_config": {"quant_method": "awq"}},
        (),
    ),
    "weights of an unknown dtype": (
        "dtype 'float8_e4m3fn' is not known; pass --weights",
        {**config("llama-3-8b"), "torch_dtype": "float8_e4m3fn"},
        (),
    ),
    "no context": ("pass --context", {k: v for k, v in config("mamba2-2.7b").items() if k != "x"}, ()),
    "text_config of another kind": ("'text_config'", {**config("gemma-3-27b"), "text_config": [1]}, ()),
    "a trace that is not there": ("--trace", config("llama-3-8b"), ("--trace", "missing.jsonl")),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_one_line(run, tmp_path, case):
    message, content, flags = NONSENSE[case]
    path = tmp_path / "missing.json"
    if content is not None:
        path = tmp_path / "config.json"
        data = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    status, out, err = run(path, "--hbm", "80GB", *flags)
    assert (status, out, len(err)) == (1, "", 1), err
    assert err[0].startswith("kvjax plan: error: ") and message in err[0]


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--hbm", "lots"),
        ("--hbm", "0GB"),
        ("--hbm", "80XB"),
        ("--hbm", "9" * 400),
        ("--hbm", "80GB", "--tp", "9" * 30),
        ("--hbm", "-1"),
        ("--hbm", "80GB", "--tp", "0"),
        ("--hbm", "80GB", "--weights", "int3"),
        ("--hbm", "80GB", "--kv-dtype", "int3"),
        ("--hbm", "80GB", "--page-size", "none"),
        ("--hbm", "80GB", "--context", "0"),
        ("--hbm", "80GB", "--slack", "1.5"),
        ("--hbm", "80GB", "--parameters", "many"),
    ],
)
def test_bad_usage_is_status_2(run, flags):
    status, out, err = run(DIRECTORY / "llama-3-8b.json", *flags)
    assert (status, out, len(err)) == (2, "", 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the file is empty"),
        ("12\nx", "trace.jsonl:2: is not JSON"),
        ("0", "length is 0"),
        ("true", "length is True"),
        ("1.5", "length is 1.5"),
        ('{"tokens": 3}', "length is None"),
        ('{"prompt_tokens": "3"}', "prompt_tokens is '3'"),
        ('{"prompt_tokens": 3, "output_tokens": -1}', "output_tokens is -1"),
        ('{"prompt_tokens": 3, "shared_prefix_tokens": 4}', "exceeds prompt_tokens=3"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_bad_lines_of_a_trace_are_named(run, tmp_path, line, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line)
    status, out, err = run(DIRECTORY / "llama-3-8b.json", "--hbm", "80GB", "--trace", trace)
    assert (status, out, len(err)) == (1, "", 1) and message in err[0]


def test_sizes_as_people_write_them():
    sizes = {"80GB": 80 * 10**9, "16GiB": 2**34, "1.5 MiB": 3 * 2**19, "4096": 4096, "7B": 7, "2TB": 2 * 10**12}
    assert {text: byte_size(text) for text in sizes} == sizes
    assert byte_rate("25GB/s") == 25 * 10**9


def test_it_runs_as_a_program_and_without_a_device(tmp_path):
    command = [sys.executable, "-m", "kvjax.cli", "plan", str(DIRECTORY / "llama-3-8b.json"), "--hbm", "80GB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)["max_sequences"] > 0
    done = subprocess.run([*command[:4], "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "examples:" in done.stdout and "shared_prefix_tokens" in done.stdout
