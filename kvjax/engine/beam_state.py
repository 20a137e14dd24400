"""What a beam search is told, and where it stands: arrays whose first axis is the prompts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float32, Int32

from kvjax.engine.steps import Log


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Rules:
    """Options as arrays, so that one compiled search serves all options of the same sizes.

    Attributes:
      divisor: what the score of a hypothesis of n tokens is divided by: n ** length_penalty.
      hoped_divisor: what that of a running one of n tokens is divided by to guess how good it can still become.
      stop_when_full: a prompt is done once it has as many finished hypotheses as beams.
      eos: ids that finish a hypothesis; −1 in padding.
    """

    divisor: Float32[Array, " lengths"]
    hoped_divisor: Float32[Array, " lengths"]
    stop_when_full: Bool[Array, ""]
    eos: Int32[Array, " max_eos"]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest hypothesis."""
        return self.divisor.shape[0] - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Beams:
    """The hypotheses of every prompt: those that run, and the best that are finished.

    Attributes:
      live: the prompt is still searched.
      length: tokens of each of a prompt's running hypotheses.
      tokens: theirs; zeros after them.
      score: the sum of their tokens' log-probabilities, best first; −inf where there is no hypothesis.
      finished_tokens, finished_length: of the finished ones, the finishing token included.
      finished_score: the sum divided by length ** length_penalty, best first; −inf where there is none yet.
      margin: the narrowest decision so far that could have changed the outcome, in units of the scores compared; NaN if
        the logits had a NaN or +inf among them, or nothing above −inf, which ends the prompt and means nothing.
    """

    live: Bool[Array, " prompts"]
    length: Int32[Array, " prompts"]
    tokens: Int32[Array, "prompts beams max_tokens"]
    score: Float32[Array, "prompts beams"]
    finished_tokens: Int32[Array, "prompts beams max_tokens"]
    finished_length: Int32[Array, "prompts beams"]
    finished_score: Float32[Array, "prompts beams"]
    margin: Float32[Array, " prompts"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts to search.

    Attributes:
      tokens: their ids; any valid id in padding.
      length: tokens of each, at least 1.
    """

    tokens: Int32[Array, "prompts width"]
    length: Int32[Array, " prompts"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Search:
    """Where a search stands.

    Attributes:
      beams: the hypotheses.
      token: the last token of each running one, not yet computed.
      status: `kvjax.Status` a prompt: not OK for one that gave up for want of pages.
      steps: decode steps so far.
      held: pages held in each of them, over all groups.
      mapped: the pages that its rows mapped, each row's counted for itself: what they would hold without sharing.
      copies: pages copied on write.
      log: what moved ownership, step by step, those that read the prompts included.
    """

    beams: Beams
    token: Int32[Array, "prompts beams"]
    status: Int32[Array, " prompts"]
    steps: Int32[Array, ""]
    held: Int32[Array, " max_steps"]
    mapped: Int32[Array, " max_steps"]
    copies: Int32[Array, ""]
    log: Log
