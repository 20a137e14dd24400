"""Drafters: who guesses the next tokens, which the model then checks all at once.

Every token comes out as it would have without drafts: the noise of a position is that of the request's seed and the
position (see `sampling.sample`), so the model's own choice at each position is known once its logits are, and a draft
is accepted where it is that choice.  Greedy and sampled tokens are the same tokens as one at a time, whatever the
drafter; a drafter that samples with the same noise agrees more often (Daliri, Musco & Suresh 2024, "Coupling without
communication and drafter-invariant speculative decoding").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree

import kvjax
from kvjax.cache import put_part, take_part
from kvjax.contiguous import ContiguousCache
from kvjax.grant import Grant, make_grant
from kvjax.inputs import static_size
from kvjax.models.protocol import Model
from kvjax.spec import CacheSpec

Choose = Callable[[Float32[Array, "slots vocabulary"], Int32[Array, " slots"]], Int32[Array, " slots"]]
"""(logits, positions of the tokens they choose) → tokens, with each slot's sampler and seed."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter is told in each step of a burst.

    Attributes:
      history: the newest known tokens of each slot, newest last; −1 before a sequence's beginning.
      grant: the step's grant: each row's newest token, then its drafts.
      row: the row of each slot; out of range in padding.
      choose: how a slot samples.
    """

    history: Int32[Array, "slots seen"]
    grant: Grant
    row: Int32[Array, " slots"]
    choose: Choose


class Drafter(Protocol):
    """Guesses up to `tokens` tokens a slot and step.

    Attributes:
      tokens: drafts at most, static.
      seen: newest tokens of a sequence it wants to see, at least 1, static.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def seen(self) -> int: ...

    def serve_with(self, model: Model) -> Model:
        """The model to serve: the target, or the target joined with what drafts for it."""
        ...

    def count(self, history: Int32[Array, "slots seen"]) -> Int32[Array, " slots"]:
        """How many drafts it has for each slot; positions for them are reserved before `draft` is called."""
        ...

    def draft(
        self, parameters: PyTree[Array], cache: Any, step: Drafting
    ) -> tuple[Any, Int32[Array, "slots {self.tokens}"]]:
        """The drafts, and the cache; `parameters` are those of the model that `serve_with` gave."""
        ...


@dataclass(frozen=True, slots=True)
class NoDrafts:
    """One token a step."""

    tokens: int = 0
    seen: int = 1

    def serve_with(self, model: Model) -> Model:
        return model

    def count(self, history: Int32[Array, "slots seen"]) -> Int32[Array, " slots"]:
        return jnp.zeros(history.shape[0], jnp.int32)

    def draft(self, parameters: PyTree[Array], cache: Any, step: Drafting) -> tuple[Any, Int32[Array, "slots 0"]]:
        return cache, jnp.zeros((step.history.shape[0], 0), jnp.int32)


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Drafts what followed the last time the newest few tokens stood in the sequence (prompt lookup, n-grams).

    Of the matches it takes the longest, then the newest with enough tokens after it.  Costs seen · longest comparisons
    a slot and step, and no model.

    Attributes:
      tokens: drafts at most.
      longest: tokens to match at most; shorter matches are taken where there is no longer one.
      seen: how far it looks back.
    """

    tokens: int = 4
    longest: int = 3
    seen: int = 1024

    def __post_init__(self) -> None:
        for name in ("tokens", "longest", "seen"):
            static_size(f"PromptLookup {name}", getattr(self, name))
        if self.seen <= self.longest:
            raise ValueError(
                f"PromptLookup seen={self.seen} must exceed longest={self.longest}: what matches comes before"
            )

    def serve_with(self, model: Model) -> Model:
        return model

    def count(self, history: Int32[Array, "slots seen"]) -> Int32[Array, " slots"]:
        return jnp.minimum(self.seen - self._follows(history), self.tokens)

    def draft(self, parameters: PyTree[Array], cache: Any, step: Drafting) -> tuple[Any, Int32[Array, "slots tokens"]]:
        place = self._follows(step.history)[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)
        return cache, jnp.take_along_axis(step.history, place, axis=1, mode="fill", fill_value=-1)

    def _follows(self, history: Int32[Array, "slots seen"]) -> Int32[Array, " slots"]:
        """Where in the history the tokens after the best match begin; `seen` if nothing matches."""
        place = jnp.arange(self.seen, dtype=jnp.int32)
        matched = jnp.zeros(history.shape, jnp.int32)
        still = jnp.ones(history.shape, bool)
        for back in range(1, self.longest + 1):
            # Rolled right by `back`: at each place the token `back` places before it.
            before = jnp.where(place >= back, jnp.roll(history, back, axis=1), -1)
            still &= (before == history[:, -back, None]) & (before >= 0)
            matched += still
        # A place nearer to the end than `tokens` has fewer tokens to offer than one as far before that point.
        newest = max(self.seen - self.tokens, 0)
        score = jnp.where(matched > 0, matched * (2 * self.seen) - jnp.abs(place - newest), -1)
        return jnp.where(jnp.any(matched > 0, axis=1), jnp.argmax(score, axis=1).astype(jnp.int32), self.seen)


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model over the same token ids drafts, one token after another, with the request's sampler and noise.

    Its keys and values are groups of the same cache: what is reserved, shared, rolled back or released is so for both
    models at once.  A step costs `tokens` small forward passes, and both models over the drafts.

    Attributes:
      model: the small model; its logits must have as many entries as the target's.
      tokens: drafts a step.
    """

    model: Model
    tokens: int = 4
    seen: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        static_size("DraftModel tokens", self.tokens)

    def serve_with(self, model: Model) -> Model:
        if model.vocabulary != self.model.vocabulary:
            raise ValueError(
                f"the draft model has {self.model.vocabulary} token ids and the model {model.vocabulary}; "
                "they must share a tokenizer"
            )
        return Joined(model, self.model)

    def count(self, history: Int32[Array, "slots seen"]) -> Int32[Array, " slots"]:
        return jnp.full(history.shape[0], self.tokens, jnp.int32)

    def draft(self, parameters: PyTree[Array], cache: Any, step: Drafting) -> tuple[Any, Int32[Array, "slots tokens"]]:
        grant, rows, slots = step.grant, step.grant.rows, step.row.shape[0]
        start = grant.context - grant.tokens

        def of_slots(values: Int32[Array, " rows"]) -> Int32[Array, " slots"]:
            return values.at[step.row].get(mode="fill", fill_value=0)

        def next_token(carry: tuple[Any, Array], index: Array) -> tuple[tuple[Any, Array], Array]:
            part, token = carry
            # A position is reserved for every token but is committed only once the target has agreed.
            one = make_grant((index < grant.tokens).astype(jnp.int32), grant.status, start + index, slots)
            of_row = jnp.zeros(rows, jnp.int32).at[step.row].set(token, mode="drop")
            fed = of_row.at[one.row].get(mode="fill", fill_value=0)
            hidden, part = self.model.forward(parameters["draft"], part, one, fed)
            part, hidden = kvjax.after(part, hidden)
            logits = self.model.logits(parameters["draft"], hidden.at[of_slots(one.last)].get(mode="clip"))
            token = step.choose(logits, of_slots(one.context))
            return (part, token), token

        carry = (take_part(cache, "draft"), step.history[:, -1])
        (part, _), drafts = lax.scan(next_token, carry, jnp.arange(self.tokens, dtype=jnp.int32))
        return put_part(cache, "draft", part), drafts.T


@dataclass(frozen=True, eq=False)
class Joined:
    """Two models that run over the same tokens and keep them in one cache; the target's logits are what counts."""

    target: Model
    draft: Model

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec.join({"target": self.target.spec, "draft": self.draft.spec})

    @property
    def parameters(self) -> dict[str, PyTree[Array]]:
        return {"target": self.target.parameters, "draft": self.draft.parameters}

    @property
    def vocabulary(self) -> int:
        return self.target.vocabulary

    @property
    def max_context(self) -> int:
        return min(self.target.max_context, self.draft.max_context)

    def forward(
        self, parameters: PyTree[Array], cache: Any, grant: Grant, tokens: Int32[Array, " packed"]
    ) -> tuple[Float[Array, "packed width"], Any]:
        """See `Model.forward`; the hidden states are the target's."""
        if isinstance(cache, ContiguousCache):
            raise NotImplementedError("a draft model needs a cache with groups of its own; use a paged cache")
        _, part = self.draft.forward(parameters["draft"], take_part(cache, "draft"), grant, tokens)
        cache = put_part(cache, "draft", part)
        hidden, part = self.target.forward(parameters["target"], take_part(cache, "target"), grant, tokens)
        return hidden, put_part(cache, "target", part)

    def logits(self, parameters: PyTree[Array], hidden: Float[Array, "n width"]) -> Float32[Array, "n vocabulary"]:
        return self.target.logits(parameters["target"], hidden)


def agreed(
    drafts: Int32[Array, "slots tokens"], chosen: Int32[Array, "slots tokens_1"], drafted: Int32[Array, " slots"]
) -> Int32[Array, " slots"]:
    """How many drafts of each slot, from the first on, are what the model chose; `drafted` of them count."""
    tokens = drafts.shape[1]
    same: Bool[Array, "slots tokens"] = (drafts == chosen[:, :tokens]) & (jnp.arange(tokens) < drafted[:, None])
    return jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
