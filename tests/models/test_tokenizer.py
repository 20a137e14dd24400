"""Tokenizers from GGUF metadata and from directories, and chat templates."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from kvjax.models import ModelError
from kvjax.models.gguf_tokenizer import SPLITTERS, tokenizer_from_gguf
from kvjax.models.tokenizer import Tokenizer, tokenizer_from_directory
from tests.models.gguf_files import TOKENIZER


def from_gguf(**fields) -> Tokenizer:
    return tokenizer_from_gguf(Path("m.gguf"), {f"tokenizer.ggml.{k}": v for k, v in {**TOKENIZER, **fields}.items()})


def test_merges_added_tokens_and_bytes():
    tokenizer = from_gguf()
    assert tokenizer.encode("ab ab") == [4, 6]
    assert tokenizer.encode("b<tool>a<|end|>") == [3, 1, 2, 0]
    assert tokenizer.decode([6, 1, 0, 4]) == " ab<tool>ab"  # control tokens do not show
    assert tokenizer.special == {"bos_token": "<|end|>", "eos_token": "<|end|>"}


def test_ends_are_added_where_the_file_says_so():
    assert from_gguf(add_bos_token=True).encode("a") == [0, 2]
    assert from_gguf(add_bos_token=True, add_eos_token=True).encode("a") == [0, 2, 0]
    assert from_gguf(add_bos_token=False).encode("a") == [2]


@pytest.mark.parametrize(
    ("splitter", "pieces"),
    [
        ("gpt-2", ["Ġin", "Ġ1984", ",", "Ġit", "'s"]),
        ("smollm", ["Ġin", "Ġ", "1", "9", "8", "4", ",", "Ġit", "'s"]),
        ("llama-bpe", ["Ġin", "Ġ", "198", "4", ",", "Ġit", "'s"]),
    ],
)
def test_how_text_is_cut(splitter, pieces):
    assert [piece for piece, _ in SPLITTERS[splitter].pre_tokenize_str(" in 1984, it's")] == pieces


def test_a_directory_without_a_tokenizer_has_none(tmp_path):
    assert tokenizer_from_directory(tmp_path) is None


def test_a_directory_with_one(tmp_path):
    Backend(models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_directory(tmp_path).encode("hello") == [0]
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer_from_directory(tmp_path).encode_chat([])
    settings = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "hello"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer_from_directory(tmp_path).encode_chat([]) == [0]
    (tmp_path / "chat_template.jinja").write_text("new")
    assert tokenizer_from_directory(tmp_path).render_chat([]) == "new"
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config.json: is not JSON"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: is not a tokenizer"):
        tokenizer_from_directory(tmp_path)


def test_a_directory_with_named_templates(tmp_path):
    Backend(models.WordLevel({"hello": 0})).save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    for template, rendered in ((named, "yes"), (named[:1], None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        tokenizer = tokenizer_from_directory(tmp_path)
        assert (None if tokenizer.chat_template is None else tokenizer.render_chat([])) == rendered


def test_a_text_without_tokens_is_refused_in_words():
    """The package raises plain Exception for it."""
    tokenizer = Tokenizer(Backend(models.WordLevel({"hello": 0}, unk_token="[UNK]")), "{{ messages[0]['content'] }}")
    with pytest.raises(ValueError, match=r"tokenizer does not take this text: WordLevel error: Missing \[UNK\]"):
        tokenizer.encode("other")
    with pytest.raises(ValueError, match="tokenizer does not take this text"):
        tokenizer.encode_chat([{"content": "other"}])


def chat(template: str) -> Tokenizer:
    return Tokenizer(Backend(models.BPE()), template, {"eos_token": "</s>"})


def test_templates_see_messages_and_special_tokens():
    template = """
{%- for message in messages %}
    {{- message['role'] + ': ' + message['content'] + eos_token }}
{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert chat(template).render_chat(messages) == "user: Hi</s>\nassistant: Hello</s>\nassistant: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not take these messages"),
        ("{{ 1 / 0 }}", "chat template fails: ZeroDivisionError: division by zero"),
        ("{{ 'a' * 10 ** 20 }}", "chat template fails: OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template fails: RecursionError"),
        ("{{ messages[0]['content'] + 1 }}", "does not take these messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe"),
    ],
)
def test_templates_can_refuse_and_are_kept_in_a_sandbox(template, message):
    with pytest.raises(ValueError, match=message):
        chat(template).render_chat([])
