"""What a caller asks for, and what comes back: requests, events and results."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]

LARGEST_FLOAT = 3.4e38
"""Of a float32, as which numbers reach the device, rounded down."""

MAX_EOS = 8
"""End-of-sequence ids a request may name; the width of an array that the burst compares every token with."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
      prompt: token ids, at least one: any sequence or 1-D integer array, kept as a tuple of ints.
      max_new_tokens: generated tokens at most, the end-of-sequence token included.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: sample among the k likeliest tokens; 0 is all.  Ties with the k-th are kept.
      top_p: sample among the fewest likeliest tokens whose probabilities, after temperature and top_k, reach it.
      seed: of the request's own noise: the same request and seed give the same tokens in whatever company.
      stop: strings that end generation; the text stops before them, the tokens with the one that completes them.
      eos: token ids that end generation; the token is kept.

    Raises:
      ValueError: a value of the wrong kind or out of range, named.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "eos"):
            object.__setattr__(self, name, token_ids(name, getattr(self, name)))
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token id")
        if isinstance(self.stop, str) or not _all_strings(self.stop):
            raise ValueError(f"stop={self.stop!r} must be a tuple of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, kind, what in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name}={value!r} must be {what}")
        if self.eos and not 0 <= min(self.eos) <= max(self.eos) < 2**31:
            raise ValueError(f"eos={self.eos} must hold ids from 0 to 2**31 − 1")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be an integer of at least 1")
        if not 0 <= self.temperature <= LARGEST_FLOAT:
            raise ValueError(f"temperature={self.temperature} must be a finite float32, 0 (greedy) or above")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or above, and below 2**31")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be in 0 … 2**32 − 1")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which every text contains")
        if len(self.eos) > MAX_EOS:
            raise ValueError(f"eos names {len(self.eos)} token ids; at most {MAX_EOS} are supported")


_NUMBERS = (
    ("max_new_tokens", Integral, "an integer"),
    ("temperature", Real, "a number"),
    ("top_k", Integral, "an integer"),
    ("top_p", Real, "a number"),
    ("seed", Integral, "an integer"),
)


def token_ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids as a tuple of ints, from any sequence or 1-D integer array; ValueError calls them `name`."""
    try:
        listed = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError as error:
        raise ValueError(f"{name}={values!r} must be a sequence of token ids") from error
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(f"{name} holds {token!r}, which is no token id; ids are integers")
    return tuple(int(token) for token in listed)


def _all_strings(values: Any) -> bool:
    return isinstance(values, tuple | list) and all(isinstance(value, str) for value in values)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request.

    Attributes:
      id: what `Engine.submit` returned.
      request: what was asked.
      tokens: generated ids.
      margins: for each, how far the winning score stood above the next (logits, or logits / temperature + noise).
      text: the decoded tokens, cut before a stop string; None if the engine was given no `decode`.
      finish_reason: "stop" (an eos id or a stop string), "length", "cancelled" or "error".
      error: what went wrong, for "error".
    """

    id: int
    request: Request
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did for one request: new tokens, new text, and the result once it is finished."""

    id: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    result: Result | None = None
