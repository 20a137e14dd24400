"""What a run cost: times by the caller's clock with compilation left out, pages, and what filled them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, median and 99th percentile over requests; NaN without any."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> Distribution:
        if not values:
            return cls(float("nan"), float("nan"), float("nan"))
        return cls(float(np.mean(values)), float(np.percentile(values, 50)), float(np.percentile(values, 99)))


@dataclass(frozen=True, slots=True)
class Metrics:
    """The sum of a run.

    Attributes:
      requests: submitted.
      finished: how many ended with each finish reason.
      prompt_tokens, generated_tokens: of all requests.
      computed_tokens: run through the model, recomputation after preemption and rejected drafts included, shared
        prefixes once.
      drafted_tokens, accepted_tokens: drafts that were checked, and those that became tokens.
      seconds: from the first submission to the last step, compilation left out.
      tokens_per_second: generated_tokens / seconds.
      ttft_seconds: time to first token, from submission, over requests that got one.
      tpot_seconds: time per output token after the first, over requests with at least two.
      compile_seconds: spent compiling.
      steps, bursts: device calls that ran the model: mixed steps and bursts.
      num_pages, page_size: of the pool.  For a contiguous cache a page is one row's whole span.
      peak_pages: pages mapped after the step where they were most.
      peak_pages_unshared: pages that the running requests would have mapped, had each its own, where those were most.
      kv_bytes_used: bytes of the most distinct committed tokens held at once.
      kv_bytes_reserved: bytes of `peak_pages` pages.
      kv_bytes_pool: bytes of the whole pool.
      fragmentation: 1 − distinct tokens held / token places in mapped pages, both summed over all steps.
      preemptions: times a request lost its row to older ones.
      resumed_by_recompute, resumed_by_swap: times one came back, its tokens computed again or its pages brought back.
      swapped_pages, swapped_bytes: moved to the host, and as many at most back.
      swaps_refused: preempted requests whose pages found no room on the host.
      prefixes_dropped: times a shared prefix did.
      copies_on_write: pages copied because they were shared.
      mean_runs: runs of adjacent pages a row, mean over steps; NaN without extents.
      compactions, moved_pages: times pages were moved together, and how many.
    """

    requests: int
    finished: dict[str, int]
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    seconds: float
    tokens_per_second: float
    ttft_seconds: Distribution
    tpot_seconds: Distribution
    compile_seconds: float
    steps: int
    bursts: int
    num_pages: int
    page_size: int
    peak_pages: int
    peak_pages_unshared: int
    kv_bytes_used: int
    kv_bytes_reserved: int
    kv_bytes_pool: int
    fragmentation: float
    preemptions: int
    resumed_by_recompute: int
    resumed_by_swap: int
    swapped_pages: int
    swapped_bytes: int
    swaps_refused: int
    prefixes_dropped: int
    copies_on_write: int
    mean_runs: float
    compactions: int
    moved_pages: int

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`; null where there is no number."""
        return asdict(self, dict_factory=lambda pairs: {name: finite(value) for name, value in pairs})


def finite(value: Any) -> Any:
    """The value; None for NaN and infinities, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class RequestTimes:
    """When one request came, got its first and its last token; seconds."""

    submitted: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0


class Recorder:
    """Collects what `Metrics` sums up.  All times are given by the caller."""

    def __init__(self, *, num_pages: int, page_size: int, bytes_per_token: int):
        self._num_pages = num_pages
        self._page_size = page_size
        self._bytes_per_token = bytes_per_token
        self._times: dict[int, RequestTimes] = {}
        self._finished: dict[str, int] = {}
        self._end = 0.0
        self._peak_pages = self._peak_unshared = self._peak_tokens = 0
        self._useful = self._mapped = 0
        self.prompt_tokens = self.computed_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.steps = self.bursts = self.preemptions = self.prefixes_dropped = self.copies_on_write = 0
        self.resumed_by_recompute = self.resumed_by_swap = 0
        self.swapped_pages = self.swapped_bytes = self.swaps_refused = 0
        self._runs: list[float] = []
        self.compactions = self.moved_pages = 0

    def submitted(self, request: int, prompt_tokens: int, now: float) -> None:
        self._times[request] = RequestTimes(now)
        self.prompt_tokens += prompt_tokens

    def generated(self, request: int, tokens: int, now: float) -> None:
        times = self._times[request]
        if tokens and times.first is None:
            times.first = now
        times.last = now
        times.tokens += tokens

    def finished(self, reason: str) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def stepped(self, *, mapped_pages: int, unshared_pages: int, useful_tokens: int, now: float) -> None:
        """After a step: pages mapped, those it would take without sharing, and distinct tokens that the cache holds."""
        self._peak_pages = max(self._peak_pages, mapped_pages)
        self._peak_unshared = max(self._peak_unshared, unshared_pages)
        self._peak_tokens = max(self._peak_tokens, useful_tokens)
        self._mapped += mapped_pages * self._page_size
        self._useful += useful_tokens
        self._end = now

    def looked_at_runs(self, mean: float) -> None:
        """After a step on extents: the runs a row then."""
        self._runs.append(mean)

    def summary(self, *, compile_seconds: float) -> Metrics:
        times = list(self._times.values())
        generated = sum(one.tokens for one in times)
        seconds = max(0.0, self._end - min((one.submitted for one in times), default=self._end))
        page_bytes = self._page_size * self._bytes_per_token
        return Metrics(
            requests=len(times),
            finished=dict(self._finished),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=generated,
            computed_tokens=self.computed_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            seconds=seconds,
            tokens_per_second=generated / seconds if seconds else float("nan"),
            ttft_seconds=Distribution.of([one.first - one.submitted for one in times if one.first is not None]),
            tpot_seconds=Distribution.of([_per_token(one) for one in times if one.tokens > 1]),
            compile_seconds=compile_seconds,
            steps=self.steps,
            bursts=self.bursts,
            num_pages=self._num_pages,
            page_size=self._page_size,
            peak_pages=self._peak_pages,
            peak_pages_unshared=self._peak_unshared,
            kv_bytes_used=self._peak_tokens * self._bytes_per_token,
            kv_bytes_reserved=self._peak_pages * page_bytes,
            kv_bytes_pool=self._num_pages * page_bytes,
            fragmentation=1 - self._useful / self._mapped if self._mapped else 0.0,
            preemptions=self.preemptions,
            resumed_by_recompute=self.resumed_by_recompute,
            resumed_by_swap=self.resumed_by_swap,
            swapped_pages=self.swapped_pages,
            swapped_bytes=self.swapped_bytes,
            swaps_refused=self.swaps_refused,
            prefixes_dropped=self.prefixes_dropped,
            copies_on_write=self.copies_on_write,
            mean_runs=float(np.mean(self._runs)) if self._runs else float("nan"),
            compactions=self.compactions,
            moved_pages=self.moved_pages,
        )


def _per_token(times: RequestTimes) -> float:
    assert times.first is not None and times.last is not None
    return (times.last - times.first) / (times.tokens - 1)
