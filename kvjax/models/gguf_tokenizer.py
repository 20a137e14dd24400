"""The byte-level BPE tokenizer inside a GGUF file, rebuilt from its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from kvjax.models.errors import ModelError
from kvjax.models.tokenizer import Tokenizer

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITTERS = {
    "gpt-2": GPT2_WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_WORDS]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), BYTES]),
}
"""`tokenizer.ggml.pre` → how text is cut before byte-pair merging."""

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of tokens matched in the text as a whole; decoded text leaves control tokens out."""


def tokenizer_from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    Raises:
      ModelError: the metadata lack a field or describe another kind of tokenizer.
    """
    fields = _Fields(path, metadata)
    if (kind := fields.get("model", str)) != "gpt2":
        fields.refuse("model", f"is {kind!r}; only 'gpt2' (byte-level BPE) can be read")
    if (splitter := fields.get("pre", str)) not in SPLITTERS:
        fields.refuse("pre", f"is {splitter!r}; known: {', '.join(SPLITTERS)}")
    tokens, kinds = fields.texts("tokens"), fields.get("token_type", list)
    if len(kinds) != len(tokens):
        fields.refuse("token_type", f"has {len(kinds)} entries for {len(tokens)} tokens")
    backend = tokenizers.Tokenizer(_merger(fields, tokens, whole_words=splitter == "llama-bpe"))
    backend.pre_tokenizer, backend.decoder = SPLITTERS[splitter], decoders.ByteLevel()
    backend.add_special_tokens(_added(tokens, kinds, CONTROL))
    backend.add_tokens(_added(tokens, kinds, USER_DEFINED))
    ends = {name: fields.token(name, tokens) for name in ("bos", "eos")}
    _add_ends(backend, fields, ends)
    template = fields.get("chat_template", str, prefix="tokenizer.", optional=True)
    return Tokenizer(backend, template, {f"{name}_token": token for name, (token, _) in ends.items()})


class _Fields:
    """The tokenizer's metadata, with errors that name the file and the field."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, metadata

    def refuse(self, name: str, problem: str, prefix: str = "tokenizer.ggml.") -> NoReturn:
        raise ModelError(self.path, f"field {prefix}{name} {problem}")

    def get(self, name: str, kind: type, *, prefix: str = "tokenizer.ggml.", optional: bool = False) -> Any:
        value = self.metadata.get(prefix + name)
        if value is None and not optional:
            self.refuse(name, "is missing", prefix)
        if value is not None and type(value) is not kind:  # metadata are plain values, and true is no integer
            self.refuse(name, f"is a {type(value).__name__}, not a {kind.__name__}", prefix)
        return value

    def texts(self, name: str) -> list[str]:
        values = self.get(name, list)
        odd = [value for value in values if not isinstance(value, str)]
        if odd:
            self.refuse(name, f"holds {odd[0]!r}, which is no text")
        return values

    def token(self, name: str, tokens: list[str]) -> tuple[str, int]:
        """(token, id) that the field `{name}_token_id` points to."""
        index = self.get(f"{name}_token_id", int)
        if not 0 <= index < len(tokens):
            self.refuse(f"{name}_token_id", f"is {index}, and there are {len(tokens)} tokens")
        return tokens[index], index


def _merger(fields: _Fields, tokens: list[str], whole_words: bool) -> models.BPE:
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in fields.texts("merges")]
    try:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        return models.BPE(vocabulary, merges, ignore_merges=whole_words)
    except Exception as error:  # the package raises plain Exception for a malformed pair or an unknown token
        raise ModelError(fields.path, f"field tokenizer.ggml.merges does not fit the tokens ({error})") from error


def _added(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
    chosen = [token for token, own in zip(tokens, kinds, strict=True) if own == kind]
    return [AddedToken(token, normalized=False, special=kind == CONTROL) for token in chosen]


def _add_ends(backend: tokenizers.Tokenizer, fields: _Fields, ends: Mapping[str, tuple[str, int]]) -> None:
    """Puts the begin and end tokens around every text, where the file asks for them."""
    begin = fields.get("add_bos_token", bool, optional=True)
    end = fields.get("add_eos_token", bool, optional=True)
    if not (begin or end):
        return
    single = [ends["bos"][0]] * bool(begin) + ["$A"] + [ends["eos"][0]] * bool(end)
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ends.values()))
