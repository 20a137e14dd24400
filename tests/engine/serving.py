"""Runs of the engine over the tiny model, and what they must give."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from kvjax.engine import Backing, ContiguousBacking, Engine, ExtentBacking, PagedBacking, Request, Result
from kvjax.extents import ExtentOptions
from tests.engine.tiny_model import CONTEXT, VOCABULARY, TinyModel, reference_tokens
from tests.margins import assert_equal_tokens, compare_tokens

NEW_TOKENS = 24
draw = np.random.default_rng(1)
PREFIX = tuple(draw.integers(0, VOCABULARY, 21).tolist())
PROMPTS = tuple(PREFIX + tuple(draw.integers(0, VOCABULARY, own).tolist()) for own in (5, 20, 1, 33, 9, 47))


@cache
def model() -> TinyModel:
    return TinyModel()


@cache
def expected(prompt: tuple[int, ...], number: int = NEW_TOKENS) -> tuple[list[int], list[float]]:
    """Greedy tokens and margins of the reference."""
    return reference_tokens(model(), prompt, number)


def paged(num_pages: int, page_size: int) -> PagedBacking:
    return PagedBacking(num_pages, page_size, CONTEXT)


def extents(num_pages: int, page_size: int, *, mean_runs: float = 1.5, **options: int) -> ExtentBacking:
    return ExtentBacking(num_pages, page_size, CONTEXT, extents=ExtentOptions(**options), mean_runs=mean_runs)


def contiguous(rows: int) -> ContiguousBacking:
    return ContiguousBacking(rows, CONTEXT)


def make_engine(backing: Backing, **settings) -> Engine:
    """An engine with few compilations: every mixed step is padded to 64 tokens."""
    return Engine(model(), backing, **({"max_seqs": 4, "chunk": 16, "burst": 8, "smallest_bucket": 64} | settings))


def serve(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    for request in requests:
        engine.submit(request)
    return engine.run()


def greedy(prompts: Sequence[tuple[int, ...]] = PROMPTS, number: int = NEW_TOKENS) -> list[Request]:
    return [Request(prompt, max_new_tokens=number) for prompt in prompts]


def assert_expected(results: Sequence[Result], what: str) -> None:
    """Every result is complete and has the reference's tokens."""
    assert all(result.finish_reason == "length" for result in results), [result.error for result in results]
    assert_same_tokens(results, what)


def assert_same_tokens(results: Sequence[Result], what: str) -> None:
    """The tokens that results have are the reference's."""
    comparisons = []
    for result in results:
        tokens, margins = expected(result.request.prompt, max(NEW_TOKENS, len(result.tokens)))
        got = len(result.tokens)
        comparisons.append(compare_tokens(result.tokens, tokens[:got], margins[:got]))
    assert_equal_tokens(comparisons, what)
