"""The engine: continuous batching of requests over a model and a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import count

import numpy as np
from numpy.typing import ArrayLike

from kvjax.engine.backing import Backing
from kvjax.engine.metrics import Metrics, Recorder
from kvjax.engine.pagemap import PageMap
from kvjax.engine.request import Event, FinishReason, Request, Result
from kvjax.engine.runner import Runner
from kvjax.engine.scheduler import Scheduler, Share
from kvjax.engine.sequence import NO_ROW, Generation, Holder, Sequence, pages_for
from kvjax.engine.speculation import Drafter, NoDrafts
from kvjax.engine.steps import Report
from kvjax.engine.text import Decode, TextStream
from kvjax.models.protocol import Model
from kvjax.pages.status import Status, raise_for_status


class Engine:
    """Serves requests: submit them at any time, call `step` (or `run`), cancel when you like.

    Every step first admits what fits, then either runs one mixed step (prompts in chunks, everybody else one token) or,
    when nobody has more than one token to compute, a burst of decode steps in one device call.  A request's tokens do
    not depend on its company, on pages, chunks or bursts, nor on being preempted.

    Args:
      model: see `kvjax.models.protocol.Model`.
      backing: the cache to stand on.
      max_seqs: requests that run at once.
      chunk: tokens of a mixed step, those of decoding requests included.
      burst: decode steps in one device call.
      max_prefixes: prefixes that may be shared; each has a row of its own.
      drafter: who guesses tokens ahead; see `speculation`.  The tokens are the same, whoever does.
      on_tokens: called with (request id, new tokens) as they come, while the device works on; from a thread of the
        runtime, and perhaps with tokens past a stop string, which end up in no result.
      smallest_bucket: batches are padded to powers of two from here up: fewer compilations, more padding.
      decode: token ids → text; needed for stop strings and text in results.
      clock: seconds, monotonic.
      page_map: records who owns which page after every step; for caches with pages.

    Raises:
      ValueError: a size below 1, or a page map without pages.
    """

    def __init__(
        self,
        model: Model,
        backing: Backing,
        *,
        max_seqs: int = 16,
        chunk: int = 64,
        burst: int = 16,
        max_prefixes: int = 1,
        drafter: Drafter | None = None,
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
        smallest_bucket: int = 1,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.perf_counter,
        page_map: PageMap | None = None,
    ):
        sizes = {"max_seqs": max_seqs, "chunk": chunk, "burst": burst, "smallest_bucket": smallest_bucket}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if page_map is not None and not backing.shares_pages:
            raise ValueError("a page map shows the pages of a paged cache; this one has none")
        self._vocabulary = model.vocabulary
        self._backing = backing
        self._max_prefixes = max_prefixes if backing.shares_pages else 0
        self._decode = decode
        self._clock = clock
        self._page_map = page_map
        self._on_tokens = on_tokens
        drafter = NoDrafts() if drafter is None else drafter
        model = drafter.serve_with(model)
        self._scheduler = Scheduler(backing, max_seqs=max_seqs, chunk=chunk, burst=burst * (drafter.tokens + 1))
        self._runner = Runner(
            model,
            backing,
            rows=max_seqs + self._max_prefixes,
            max_seqs=max_seqs,
            burst=burst,
            smallest_bucket=smallest_bucket,
            drafter=drafter,
            stream=None if on_tokens is None else self._stream,
            clock=clock,
        )
        self._recorder = Recorder(
            num_pages=backing.num_pages,
            page_size=backing.page_size,
            bytes_per_token=drafter.serve_with(model).spec.bytes_per_token,
        )
        self._ids = count()
        self._unfinished: dict[int, Generation] = {}
        self._cancelled: set[int] = set()
        self._events: list[Event] = []
        self.results: dict[int, Result] = {}

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or remains to be told."""
        return not self._unfinished and not self._events

    @property
    def compiled(self) -> list[tuple[str, int]]:
        """(function, bucket) of every compilation so far."""
        return self._runner.executables.compiled

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id.

        One that can never be served ends with finish_reason "error" at once; everybody else goes on.
        """
        number = next(self._ids)
        self._recorder.submitted(number, len(request.prompt), self._now())
        generation = Generation(
            list(request.prompt),
            order=number,
            id=number,
            request=request,
            limit=min(request.max_new_tokens, self._backing.max_context - len(request.prompt)),
            text=None if self._decode is None else TextStream(self._decode, request.stop),
        )
        self._unfinished[number] = generation
        problem = self._why_not(request)
        if problem is None:
            self._scheduler.waiting.append(generation)
        else:
            self._tell(generation, "error", error=problem)
        return number

    def add_prefix(self, tokens: Ordered[int]) -> None:
        """Lets requests that begin with `tokens` share one computation and one copy of them.

        The prefix is computed when the first such request is admitted.  Its pages are given up when they are needed and
        nobody uses them, and computed again later.  A contiguous cache shares nothing: there the call has no effect.

        Raises:
          ValueError: an empty prefix, one that does not fit the cache, or more prefixes than `max_prefixes`.
        """
        prefix = tuple(tokens)
        if not prefix:
            raise ValueError("a shared prefix needs at least one token")
        problem = self._why_not(Request(prefix))
        if problem is not None:
            raise ValueError(f"a shared prefix is a prompt too: {problem}")
        if not self._backing.shares_pages or prefix in self._scheduler.prefixes:
            return
        if len(self._scheduler.prefixes) == self._max_prefixes:
            raise ValueError(f"max_prefixes={self._max_prefixes} prefixes are shared already; raise max_prefixes")
        self._scheduler.prefixes.append(prefix)

    def cancel(self, request: int) -> bool:
        """Ends a request before the next step, wherever it is; False if it has finished already or never was.

        May be called while events are read and from another thread.
        """
        if request not in self._unfinished:
            return False
        self._cancelled.add(request)
        return True

    def run(self, on_event: Callable[[Event], None] | None = None) -> list[Result]:
        """Steps until idle; returns the results of all requests so far, by id."""
        while not self.idle:
            for event in self.step():
                if on_event is not None:
                    on_event(event)
        return [self.results[number] for number in sorted(self.results)]

    def step(self) -> list[Event]:
        """Runs one step; returns what happened to whom."""
        self._serve_cancellations()
        self._runner.fork([one for one in self._scheduler.admit(self._runner.free) if one.holder is not None])
        shares = self._scheduler.plan()
        if shares:
            self._serve(shares)
        events, self._events = self._events, []
        return events

    def metrics(self) -> Metrics:
        """What it cost so far."""
        return self._recorder.summary(compile_seconds=self._runner.executables.compile_seconds)

    def _serve(self, shares: list[Share]) -> None:
        sampling = [
            share.sequence
            for share in shares
            if isinstance(share.sequence, Generation) and share.count == share.sequence.pending
        ]
        if len(sampling) == len(shares) and all(share.count == 1 for share in shares):
            report = self._runner.burst(sampling, yield_early=bool(self._scheduler.waiting))
            self._recorder.bursts += 1
        else:
            report = self._runner.mixed(shares, sampling)
            self._recorder.steps += 1
            if self._on_tokens is not None:
                self._runner.bursting = tuple(sampling)
                self._stream(report.tokens, report.produced)
        self._recorder.copies_on_write += int(report.copies)
        self._recorder.drafted_tokens += int(report.drafted)
        self._recorder.accepted_tokens += int(report.accepted)
        self._recorder.computed_tokens += int(report.drafted - report.accepted)
        for share in shares:
            committed = int(report.committed[share.sequence.row])
            share.sequence.computed += committed
            self._recorder.computed_tokens += committed
        self._observe()
        self._hand_out(sampling, report)
        self._make_room(shares, report)

    def _stream(self, tokens: ArrayLike, count: ArrayLike) -> None:
        """Tells of one step of a burst while the burst goes on."""
        assert self._on_tokens is not None
        tokens, count = np.asarray(tokens), np.asarray(count)
        for slot, generation in enumerate(self._runner.bursting):
            if count[slot]:
                self._on_tokens(generation.id, tuple(tokens[slot, : count[slot]].tolist()))

    def _hand_out(self, sampling: Ordered[Generation], report: Report) -> None:
        """Gives every generation the tokens it sampled; ends those that are done."""
        now = self._now()
        done = []
        for slot, generation in enumerate(sampling):
            known = len(generation.tokens)
            sampled = slice(0, int(report.produced[slot]))
            reason = generation.take(report.tokens[slot, sampled].tolist(), report.margins[slot, sampled].tolist())
            new = tuple(generation.tokens[known:])
            self._recorder.generated(generation.id, len(new), now)
            if reason is not None:
                done.append((generation, reason, new))
            elif new:
                text = "" if generation.text is None else generation.text.take()
                self._events.append(Event(generation.id, new, text))
        self._runner.release([generation for generation, *_ in done])
        for generation, reason, new in done:
            self._scheduler.remove(generation)
            self._tell(generation, reason, new)

    def _make_room(self, shares: list[Share], report: Report) -> None:
        """Takes pages from the newest for the oldest that was refused some; ends it if nobody is left to give any."""
        lacking = (Status.OUT_OF_PAGES, Status.PAGES_PENDING)
        status = report.status
        raise_for_status([Status.OK if code in lacking else code for code in status], operation="reserve")
        refused = next((share for share in shares if status[share.sequence.row] in lacking), None)
        if refused is None:
            return
        gave_way = False
        while self._runner.free < self._scheduler.shortage(refused):
            victim = self._scheduler.give_way()
            if victim is None:
                # Giving way may free no page and still help: one that is no longer shared need not be copied.
                if not gave_way and self._runner.free == report.free:
                    self._give_up(refused.sequence)
                return
            self._runner.release([victim])
            self._scheduler.preempt(victim)
            gave_way = True
            if isinstance(victim, Holder):
                self._recorder.prefixes_dropped += 1
            else:
                self._recorder.preemptions += 1
            if victim is refused.sequence:
                return

    def _give_up(self, sequence: Sequence) -> None:
        """Ends a request that has the whole pool to itself and does not fit."""
        assert isinstance(sequence, Generation), "a prefix that fits the pool was refused an empty one"
        pool = f"{self._backing.num_pages} pages of {self._backing.page_size} tokens"
        problem = f"the cache of {pool} is full after {len(sequence.tokens)} tokens; raise num_pages"
        self._runner.release([sequence])
        self._scheduler.remove(sequence)
        self._tell(sequence, "error", error=problem)

    def _serve_cancellations(self) -> None:
        while self._cancelled:
            generation = self._unfinished.get(self._cancelled.pop())
            if generation is None:
                continue
            if generation.row != NO_ROW:
                self._runner.release([generation])
            self._scheduler.remove(generation)
            self._tell(generation, "cancelled")

    def _tell(
        self, generation: Generation, reason: FinishReason, new: tuple[int, ...] = (), *, error: str | None = None
    ) -> None:
        """Records a request's end and its last event."""
        del self._unfinished[generation.id]
        rest = "" if generation.text is None else generation.text.finish()
        result = generation.result(reason, error)
        self.results[generation.id] = result
        self._recorder.finished(reason)
        self._events.append(Event(generation.id, new, rest, result))

    def _observe(self) -> None:
        """Records what the pool holds after a step, before anybody leaves it."""
        now, scheduler = self._now(), self._scheduler
        mapped = self._backing.num_pages - self._runner.free
        self._recorder.stepped(mapped_pages=mapped, useful_tokens=scheduler.useful_tokens(), now=now)
        if self._page_map is not None:
            labels = {holder.row: f"prefix {index}" for index, holder in scheduler.holders.items()}
            labels |= {one.row: f"request {one.id}" for one in scheduler.running}
            self._page_map.record(self._runner.cache.table, labels, now)

    def _now(self) -> float:
        """Seconds by the clock, as if compilation took no time."""
        return self._clock() - self._runner.executables.compile_seconds

    def _why_not(self, request: Request) -> str | None:
        """Why a request can never be served; None if it can."""
        prompt, backing = request.prompt, self._backing
        foreign = [token for token in prompt if not 0 <= token < self._vocabulary]
        if foreign:
            return f"prompt holds token id {foreign[0]}; the vocabulary is 0 … {self._vocabulary - 1}"
        if len(prompt) >= backing.max_context:
            return f"prompt of {len(prompt)} tokens leaves no room in a context of {backing.max_context}"
        if pages_for(len(prompt), backing.page_size) > backing.num_pages:
            return (
                f"prompt of {len(prompt)} tokens does not fit the cache of {backing.num_pages} pages of "
                f"{backing.page_size} tokens; raise num_pages"
            )
        if request.stop and self._decode is None:
            return "stop strings need a tokenizer, and there is none; use eos ids"
        return None
