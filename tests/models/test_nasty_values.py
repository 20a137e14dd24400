"""Whatever stands in a field of a model's files: the model loads, or one typed error names the file.

Every field of every JSON file of a tiny model is left out and replaced by each of a list of nasty values.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from kvjax.engine.request import MAX_EOS, Request
from kvjax.models import ModelError, load, loading
from kvjax.models.rope import VARIANTS
from tests.models.decoding import FIXTURES

LEFT_OUT = object()
NASTY = [
    LEFT_OUT,
    None,
    True,
    0,
    -1,
    3,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    "\ud800",
    "{{ 1 / 0 }}",
    [],
    [1],
    [None],
    [-1],
    list(range(9)),
    {},
    {"x": 1},
]
UNREAD = ("attention_dropout", "dtype", "initializer_range", "pad_token_id", "pretraining_tp", "transformers_version")
STORED = json.loads((FIXTURES / "tiny-llama" / "config.json").read_text())
CONFIG = {name: value for name, value in STORED.items() if name not in (*UNREAD, "bos_token_id", "use_cache")} | {
    "eos_token_id": 2,
    "layer_types": None,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": CONFIG["rope_parameters"],
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": True,
    },
}
SETTINGS = {
    "bos_token": "hello",
    "eos_token": {"content": "hello"},
    "unk_token": "[UNK]",
    "chat_template": "{{ eos_token }}",
}


@pytest.fixture
def directory(tmp_path) -> Path:
    """A copy of tiny-llama with every file that the loader reads."""
    directory = Path(shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "model"))
    Backend(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory


def variants(fields: dict) -> Iterator[tuple[str, dict]]:
    """The object with one field at a time replaced; what was done in words."""
    for field in fields:
        for value in NASTY:
            changed = {name: value if name == field else old for name, old in fields.items()}
            yield f"{field}={value!r}"[:60], {name: one for name, one in changed.items() if one is not LEFT_OUT}


def serve(directory: Path) -> str | None:
    """Loads the model and uses what came with it; the message of the typed error if that is what came."""
    try:
        loaded = load(directory)
    except ModelError as error:
        return str(error)
    Request((1,), eos=loaded.eos)
    assert all(np.isfinite(loaded.model.config.rope.frequencies))
    try:
        loaded.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    except ValueError as error:
        assert "chat template" in str(error) or "tokenizer" in str(error)
    return None


def outcomes(directory: Path, name: str, cases: Iterator[tuple[str, dict]]) -> dict[str, str | None]:
    """What became of each case; a refusal names the file, or the directory where the weights do not fit the config."""
    found = {}
    for case, fields in cases:
        (directory / name).write_text(json.dumps(fields))
        found[case] = message = serve(directory)
        if message is not None:
            assert message.startswith((f"{directory / name}: ", f"{directory}: ")) and "\n" not in message, case
    return found


def test_the_config(directory):
    found = outcomes(directory, "config.json", variants(CONFIG))
    assert found["vocab_size=9223372036854775808"] is not None and found["architectures=None"] is None
    for case in ("layer_types=3", "rms_norm_eps=nan", "rms_norm_eps=inf", "max_position_embeddings=2147483648"):
        assert case.split("=")[0] in found[case]


@pytest.mark.parametrize("kind", list(VARIANTS))
def test_the_rotary_fields(directory, kind):
    ropes = variants({"rope_theta": 10000.0, **ROPES[kind], "rope_type": kind})
    found = outcomes(directory, "config.json", ((case, CONFIG | {"rope_parameters": rope}) for case, rope in ropes))
    assert "rope_type=[1]" in found["rope_type=[1]"]


def test_the_tokenizer_settings(directory):
    found = outcomes(directory, "tokenizer_config.json", variants(SETTINGS))
    assert "field bos_token is {'x': 1}" in found["bos_token={'x': 1}"]
    assert found["chat_template='{{ 1 / 0 }}'"] is None  # only a chat fails


def test_the_end_tokens(directory):
    found = outcomes(directory, "generation_config.json", variants({"eos_token_id": 2}))
    assert "holds 9 token ids; at most 8" in found["eos_token_id=[0, 1, 2, 3, 4, 5, 6, 7, 8]"]
    for value in (2**31, -1):
        assert f"eos_token_id holds {value};" in found[f"eos_token_id={value}"]
    assert loading.MAX_EOS == MAX_EOS


def test_the_index_of_shards(directory):
    name = "model.safetensors.index.json"
    files = [*NASTY, "../model", "a\0b", "a" * 5000]
    cases = (({"weight_map": one}, {"weight_map": {"model.norm.weight": one}}) for one in files if one is not LEFT_OUT)
    outcomes_of_files = {}
    for index, pair in enumerate(cases):
        for fields in pair:
            (directory / name).write_text(json.dumps(fields))
            outcomes_of_files[index] = serve(directory)
    assert None not in outcomes_of_files.values()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}\0",
        b"1" * 5000,
        b'{"model": {"type": "BPE"}}',
    ],
    ids=["empty", "not UTF-8", "null", "deep list", "deep object", "zero byte", "long number", "half"],
)
def test_whole_files(directory, name, content):
    (directory / name).write_bytes(content)
    message = serve(directory)
    assert message is None or message.startswith(f"{directory / name}: ")
    (directory / name).unlink()
    (directory / name).mkdir()
    assert serve(directory).startswith(f"{directory / name}: ")


def test_a_template_file_that_is_not_text(directory):
    (directory / "chat_template.jinja").write_bytes(b"{{ messages }}\xff")
    assert serve(directory).startswith(f"{directory / 'chat_template.jinja'}: is not UTF-8")
