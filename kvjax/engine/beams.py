"""Beam search of batches of prompts over a paged cache, equal to Hugging Face transformers' `generate(num_beams=…)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.engine.beam_loop import beam_search
from kvjax.engine.beam_rules import candidates_of
from kvjax.engine.beam_state import Prompts, Rules, Search
from kvjax.engine.executables import power_of_two
from kvjax.engine.request import token_ids
from kvjax.inputs import static_size
from kvjax.models.protocol import Model
from kvjax.pages.status import Status, raise_for_faults

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """How to search; names, meanings and defaults are those of transformers.

    Attributes:
      num_beams: hypotheses that run at a time, at least 2 (one is greedy decoding: see `Engine`).
      max_new_tokens: tokens of the longest hypothesis.
      length_penalty: a finished hypothesis scores the sum of its log-probabilities / length ** length_penalty.
      early_stopping: when a prompt with `num_beams` finished hypotheses is done.  True: at once.  False: when the best
        running one, at its present length, scores no better than the worst finished one.  "never": when it could not
        even at max_new_tokens, if length_penalty is positive.
      num_return_sequences: finished hypotheses to return, best first.
      eos: token ids that finish a hypothesis; the token is kept.

    Raises:
      ValueError: a value out of range, named.
    """

    num_beams: int = 4
    max_new_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens", "num_return_sequences"):
            static_size(name, getattr(self, name))
        if self.num_beams < 2:
            raise ValueError(f"num_beams={self.num_beams} must be at least 2; one beam is greedy decoding: use Engine")
        object.__setattr__(self, "eos", token_ids("eos", self.eos))
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, Real):
            raise ValueError(f"length_penalty={self.length_penalty!r} must be a number")
        # The scores are float32, and so is what they are divided by.
        if not abs(self.length_penalty) * math.log10(self.max_new_tokens) < 30:
            raise ValueError(
                f"length_penalty={self.length_penalty}: {self.max_new_tokens} ** length_penalty is beyond float32"
            )
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f'early_stopping={self.early_stopping!r} must be True, False or "never"')
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} must be from 1 to num_beams={self.num_beams}"
            )
        if self.eos and not 0 <= min(self.eos) <= max(self.eos) < 2**31:
            raise ValueError(f"eos={self.eos} must hold ids from 0 to 2**31 − 1")

    @property
    def rules(self) -> Rules:
        """The options as the device takes them."""
        lengths = np.maximum(np.arange(self.max_new_tokens + 1), 1)
        hoped = lengths
        if self.early_stopping == "never" and self.length_penalty > 0:
            hoped = np.full_like(lengths, self.max_new_tokens)
        return Rules(
            divisor=jnp.asarray(lengths**self.length_penalty, jnp.float32),
            hoped_divisor=jnp.asarray(hoped**self.length_penalty, jnp.float32),
            stop_when_full=jnp.asarray(self.early_stopping is True),
            eos=jnp.asarray(self.eos, jnp.int32),
        )


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence.

    Attributes:
      tokens: generated ids, the end token included if it has one.
      score: the sum of their log-probabilities / len(tokens) ** length_penalty.
    """

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class BeamResult:
    """What came of one prompt.

    Attributes:
      hypotheses: the best ones, best first; none if there is an error.
      status: `Status.OK`, or why the pages it needed were refused.
      error: why there is no result; None if there is one.
      margin: the narrowest decision that could have changed the outcome, as a difference of scores: where it is no more
        than float32 sums of another batch shape differ by, another outcome is as right.
    """

    hypotheses: tuple[Hypothesis, ...]
    status: Status
    error: str | None
    margin: float


@dataclass(frozen=True, slots=True)
class BeamReport:
    """What came of a batch, and how far its beams shared pages.

    Attributes:
      results: one a prompt, in order.
      held: pages held in each decode step.
      unshared: pages that the same beams would have held in it without sharing.
      copies: pages copied on write.
    """

    results: tuple[BeamResult, ...]
    held: tuple[int, ...]
    unshared: tuple[int, ...]
    copies: int

    @property
    def peak(self) -> tuple[int, int]:
        """(held, unshared) in the step in which most pages were held, the first such; zeros if there was no step."""
        return max(zip(self.held, self.unshared, strict=True), key=lambda step: step[0], default=(0, 0))

    @property
    def saved(self) -> float:
        """The share of pages that sharing saved, over all steps (as in PagedAttention, Kwon et al. 2023, §6.3)."""
        return _saved(sum(self.held), sum(self.unshared))

    @property
    def saved_at_peak(self) -> float:
        return _saved(*self.peak)


def _saved(held: int, unshared: int) -> float:
    return 1 - held / unshared if unshared else 0.0


class BeamSearch:
    """Beam search over a paged cache of its own; each batch of prompts is one device call.

    A prompt's result depends on the prompt and the options alone, not on its company, the pages or the chunk.

    Args:
      model: see `kvjax.models.protocol.Model`.
      rows: beams that may run at once, those of all prompts of a batch together.
      num_pages, page_size, max_context: of the cache; see `kvjax.init`.
      chunk: prompt tokens computed in one step.
      backend, extents: see `kvjax.init`.

    Attributes:
      cache: the cache, empty between batches; `run` donates and replaces it.
    """

    def __init__(
        self,
        model: Model,
        *,
        rows: int,
        num_pages: int,
        page_size: int = 16,
        max_context: int,
        chunk: int = 64,
        backend: kvjax.cache.Backend | None = None,
        extents: kvjax.extents.ExtentOptions | None = None,
    ):
        chunk = static_size("chunk", chunk)
        self._model = model
        self.cache = kvjax.init(
            model.spec,
            rows=rows,
            num_pages=num_pages,
            page_size=page_size,
            max_context=max_context,
            backend=backend,
            extents=extents,
        )
        self._search = jax.jit(partial(beam_search, model, chunk), static_argnames="num_beams", donate_argnames="cache")

    def run(self, prompts: Sequence[Sequence[int]], options: BeamOptions) -> BeamReport:
        """Searches a batch.  Compiles for each new number of prompts, of beams, of tokens and of end tokens.

        If the pool has too few pages for all, the last prompts give way: their status says so, and the others lose
        nothing.

        Raises:
          ValueError: no prompts, more than the rows have beams for, or one that can never be served.
          PageTableError: the cache was damaged.
        """
        prompts = [token_ids(f"prompt {index}", prompt) for index, prompt in enumerate(prompts)]
        width = self._check(prompts, options)
        tokens = np.zeros((len(prompts), width), np.int32)
        for line, prompt in zip(tokens, prompts, strict=True):
            line[: len(prompt)] = prompt
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        self.cache, found = self._search(
            self._model.parameters,
            self.cache,
            Prompts(jnp.asarray(tokens), jnp.asarray(lengths)),
            options.rules,
            num_beams=options.num_beams,
        )
        raise_for_faults(self.cache.table.faults)
        return _report(found, options)

    def why_not(self, prompt: Sequence[int], options: BeamOptions) -> str | None:
        """Why a prompt can never be served, whatever its company; None if it can."""
        if len(prompt) == 0:
            return "the prompt is empty; give at least one token id"
        foreign = [token for token in prompt if not 0 <= token < self._model.vocabulary]
        if foreign:
            return f"the prompt holds {foreign[0]}, no id of a vocabulary of {self._model.vocabulary}"
        need, room = len(prompt) + options.max_new_tokens, self.cache.max_context
        if need > room:
            return (
                f"{len(prompt)} prompt tokens and max_new_tokens={options.max_new_tokens} are more than the "
                f"{room} positions of a row; ask for fewer"
            )
        return None

    def _check(self, prompts: Sequence[Sequence[int]], options: BeamOptions) -> int:
        """The width of the batch; ValueError if it cannot be searched."""
        if not prompts:
            raise ValueError("there are no prompts; give at least one")
        if len(prompts) * options.num_beams > self.cache.rows:
            raise ValueError(
                f"{len(prompts)} prompts of {options.num_beams} beams need more than the cache's {self.cache.rows} "
                "rows; search fewer at once or raise rows"
            )
        least = candidates_of(options.num_beams, len(options.eos))
        if self._model.vocabulary < least:
            raise ValueError(
                f"{options.num_beams} beams and {len(options.eos)} end tokens choose among {least} ids, and the "
                f"vocabulary has {self._model.vocabulary}; use fewer beams"
            )
        for index, prompt in enumerate(prompts):
            problem = self.why_not(prompt, options)
            if problem is not None:
                raise ValueError(f"prompt {index}: {problem}")
        return power_of_two(max(map(len, prompts)))


def _report(found: Search, options: BeamOptions) -> BeamReport:
    beams, steps = found.beams, int(found.steps)
    of_prompts = (found.status, beams.margin, beams.finished_tokens, beams.finished_length, beams.finished_score)
    of_prompts, held, mapped = jax.device_get((of_prompts, found.held, found.mapped))
    return BeamReport(
        results=tuple(
            _result(*values, number=options.num_return_sequences) for values in zip(*of_prompts, strict=True)
        ),
        held=tuple(held[:steps].tolist()),
        unshared=tuple(mapped[:steps].tolist()),
        copies=int(found.copies),
    )


def _result(
    status_code: np.int32,
    margin: np.float32,
    tokens: np.ndarray,
    lengths: np.ndarray,
    scores: np.ndarray,
    *,
    number: int,
) -> BeamResult:
    """What one prompt's finished hypotheses come to, the best `number` of them."""
    status = Status(int(status_code))
    if status != Status.OK:
        message = f"its beams were refused pages ({status.name}); build the cache with more, or search fewer at once"
        return BeamResult((), status, message, float(margin))
    if np.isnan(margin):
        return BeamResult((), status, "the model's logits are not finite", float(margin))
    hypotheses = tuple(
        Hypothesis(tuple(ids[:length].tolist()), float(score))
        for ids, length, score in zip(tokens[:number], lengths, scores, strict=False)
    )
    # Which of two comes first was no decision of the search, but it is one of the result.
    orders = [float(better - worse) for better, worse in pairwise(scores[: number + 1])]
    return BeamResult(hypotheses, status, None, min([float(margin), *orders]))
