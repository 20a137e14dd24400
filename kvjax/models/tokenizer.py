"""Text to token ids and back, and chat messages to a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvjax.models.errors import ModelError
from kvjax.models.json_file import read_object, read_text


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and, where the model has one, its chat template.

    Attributes:
      backend: the `tokenizers` object.
      chat_template: Jinja source as Hugging Face models carry it; None if the model has none.
      special: names of special tokens that the template may use (`bos_token`, `eos_token`, …).
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    chat_template: str | None = field(default=None, repr=False)
    special: Mapping[str, str] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the begin and end tokens that the model's tokenizer adds by itself.

        Raises:
          ValueError: the tokenizer has no tokens for this text.
        """
        return self._encode(text, special=True)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `[{"role": …, "content": …}, …]`, ready for the assistant's answer.

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
        """
        return self._encode(self.render_chat(messages), special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=special).ids
        except Exception as error:  # the package raises plain Exception: an unknown word and no token for it, …
            raise ValueError(f"the model's tokenizer does not take this text: {error}") from error

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text behind `encode_chat`."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template; give it plain text")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # The template is code that came with the model: sandboxed, with the settings transformers renders it under.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **self.special)
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error
        except Exception as error:  # whatever its expressions can raise, from division by zero to want of memory
            raise ValueError(f"the model's chat template fails: {type(error).__name__}: {error}") from error


def tokenizer_from_directory(directory: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory; None if it has no `tokenizer.json`.

    Raises:
      ModelError: a tokenizer file cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every fault of the file
        raise ModelError(path, f"is not a tokenizer ({error})") from error
    settings_path = directory / "tokenizer_config.json"
    settings = read_object(settings_path) if settings_path.exists() else {}
    special = {
        name: _content(settings_path, name, settings[name])
        for name in ("bos_token", "eos_token", "unk_token")
        if settings.get(name) is not None
    }
    return Tokenizer(backend, _template(directory, settings_path, settings), special)


def _template(directory: Path, settings_path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a text, or the one called "default" of a list of named ones."""
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(one, dict) for one in template):
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelError(settings_path, f"field chat_template is a {type(template).__name__}; it must be a text")
    return template


def _content(path: Path, name: str, token: Any) -> str:
    """A special token's text: the field itself, or its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise ModelError(path, f'field {name} is {token!r}; it must be a text or an object with the text "content"')
    return content
