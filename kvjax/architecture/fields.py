"""Reads a config field by field and remembers what each was used for.

A field nobody asked for is harmless unless its name says that it may change what is cached: those are refused by name,
because a size that silently left them out would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CACHE_RELEVANT = (
    "head",
    "kv",
    "rope",
    "rotary",
    "window",
    "sliding",
    "swa",
    "multi_query",
    "query_group",
    "cross_layer",
    "chunk",
    "rank",
    "lora",
    "state",
    "ssm",
    "mamba",
    "conv",
    "layer_type",
    "layers_block",
    "block_type",
    "hybrid",
    "attn",
    "attention",
    "linear_",
    "recurrent",
    "cache",
    "compress",
    "index",
    "latent",
)
"""A field whose name holds one of these may change what is cached: unknown ones are refused."""

INERT = re.compile(
    r"""
    attention_(bias|dropout|out_bias|probs_dropout_prob)
    | attn_(logit|temperature|scale|implementation|dropout|bias|pdrop).*
    | _attn_implementation.* | (attn|final)_logit_softcapping | attention_(multiplier|in_multiplier|out_multiplier)
    | rope_(theta|scaling|parameters|type|interleave|local_base_freq|pct|ratio|pairing) | default_rope.*
    | rotary_(emb_base|pct|dim|base) | attn_rotary_emb | use_rotary.* | indexer_rope_interleave
    | (global|local)_rope_theta | compress_rope_theta | partial_rotary_factor | original_max_position_embeddings
    | use_cache | cache_implementation | use_bidirectional_attention | lm_head_multiplier | lm_head_bias
    | (boi|eoi|image|video)_token_index | index_topk | query_pre_attn_scalar | for_llm_compressor | qk_head_dim
    """,
    re.VERBOSE,
)
"""Fields that match a pattern and change no size: rotation, scaling of logits, dropout, special tokens, top-k."""


MAX_LAYERS = 2**16
"""No model comes near; a description lists its layers, so a number from a damaged file must not become a list."""


class ConfigError(ValueError):
    """A config cannot be read; the message names the field, its value and what would be right.

    Attributes:
      field: the field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class FieldUse:
    """What a field was used for.

    Attributes:
      field: its name, with the section it stands in ("text_config.head_dim").
      value: what was read, or taken in its place.
      use: for what.
      given: the config says so; otherwise it is the family's own default.
    """

    field: str
    value: Any
    use: str
    given: bool


class Fields:
    """A config being read.

    Attributes:
      family: its model_type.
      uses: what was read so far.
    """

    def __init__(
        self, config: Mapping[str, Any], family: str, prefix: str = "", uses: list[FieldUse] | None = None
    ) -> None:
        self._config, self._prefix, self.family = config, prefix, family
        self._known: set[str] = {"model_type"}
        self._defaults: Mapping[str, int] = {}
        self._sections: list[Fields] = []
        self.uses: list[FieldUse] = [] if uses is None else uses

    def __contains__(self, field: str) -> bool:
        """The config has this field, if only as null."""
        return field in self._config

    def has(self, field: str) -> bool:
        """The config gives this field a value other than null."""
        return self._config.get(field) is not None

    def assume(self, defaults: Mapping[str, int]) -> None:
        """The family's own numbers for fields that its published files leave out."""
        self._defaults = defaults

    def raw(self, field: str, use: str, default: Any = None) -> Any:
        """A field as it stands, unchecked; the default is the family's own where the field is missing or null."""
        self._known.add(field)
        value = self._config.get(field)
        given = value is not None
        value = value if given else default
        self.uses.append(FieldUse(self._prefix + field, value, use, given))
        return value

    def integer(self, field: str, use: str, default: int | None = None) -> int:
        """A positive integer; ConfigError if it is missing and has no default, or is anything else."""
        self._known.add(field)
        value = config_integer(self._config, field, self._defaults.get(field, default), self._prefix)
        self.uses.append(FieldUse(self._prefix + field, value, use, self.has(field)))
        return value

    def optional(self, field: str, use: str) -> int | None:
        """A positive integer, or None where the field is missing or null."""
        if not self.has(field) and field not in self._defaults:
            self._known.add(field)
            return None
        return self.integer(field, use)

    def layers(self, default: int | None = None) -> int:
        """The number of layers; ConfigError beyond `MAX_LAYERS`."""
        layers = self.integer("num_hidden_layers", "number of layers", default)
        if layers > MAX_LAYERS:
            message = f"config has num_hidden_layers={layers}; at most {MAX_LAYERS} are read"
            raise ConfigError("num_hidden_layers", message)
        return layers

    def whole(self, field: str, use: str, default: int) -> int:
        """An integer of at least 0; ConfigError for anything else."""
        value = self.raw(field, use, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(field, f"config field {self._prefix + field!r}={_short(value)} must be an integer ≥ 0")
        return value

    def integers(self, field: str, use: str, length: int | None = None) -> tuple[int, ...] | None:
        """A list of integers (`length` of them), or None where the field is missing or null."""
        values = self.sequence(field, use, length)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values or ()):
            raise ConfigError(
                field, f"config field {self._prefix + field!r} is {_short(values)}; it must list integers"
            )
        return values

    def flag(self, field: str, use: str, default: bool = False) -> bool:
        """True or false; ConfigError for anything else."""
        value = self.raw(field, use, default)
        if not isinstance(value, bool):
            raise ConfigError(field, f"config field {self._prefix + field!r} is {value!r}; it must be true or false")
        return value

    def sequence(self, field: str, use: str, length: int | None = None) -> tuple[Any, ...] | None:
        """A list (of `length` elements), or None where the field is missing or null."""
        value = self.raw(field, use)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            wanted = "a list" if length is None else f"a list with one element for each of {length} layers"
            raise ConfigError(field, f"config field {self._prefix + field!r} is {_short(value)}; it must be {wanted}")
        return tuple(value)

    def layer_kinds(self, field: str, use: str, length: int, known: Sequence[str]) -> tuple[str, ...] | None:
        """One name a layer out of `known`, or None where the field is missing or null."""
        kinds = self.sequence(field, use, length)
        for index, kind in enumerate(kinds or ()):
            if kind not in known:
                raise ConfigError(
                    field,
                    f"config field {self._prefix + field!r} has {kind!r} at layer {index}; "
                    f"{self.family} layers can be {', '.join(known)}",
                )
        return kinds

    def section(self, field: str) -> Fields:
        """A nested object, read like this one."""
        value = self._config.get(field)
        if not isinstance(value, Mapping):
            raise ConfigError(field, f"config field {self._prefix + field!r} is {_short(value)}; it must be an object")
        self._known.add(field)
        section = Fields(value, str(value.get("model_type", self.family)), f"{self._prefix}{field}.", self.uses)
        self._sections.append(section)
        return section

    def skip(self, *fields: str) -> None:
        """Fields of this family that do not change what is cached, though their names look like it."""
        self._known.update(fields)

    def finish(self) -> None:
        """ConfigError for the first unread field that may change what is cached and has a value."""
        for section in self._sections:
            section.finish()
        for field, value in self._config.items():
            if field in self._known or value is None or INERT.fullmatch(field):
                continue
            pattern = next((pattern for pattern in CACHE_RELEVANT if pattern in field.lower()), None)
            if pattern is not None:
                raise ConfigError(
                    field,
                    f"config field {self._prefix + field!r} = {_short(value)} is not known for {self.family}, and "
                    f"{pattern!r} in its name says that it may change what is cached; remove it if it does not",
                )


def config_integer(config: Mapping[str, Any], field: str, default: int | None = None, prefix: str = "") -> int:
    """A positive integer field of a config; ConfigError names the field and the value."""
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ConfigError(field, f"config has no field {prefix + field!r}; add it (a positive integer)")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        message = f"config field {prefix + field!r}={_short(value)} must be a positive integer below 2**31"
        raise ConfigError(field, message)
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
