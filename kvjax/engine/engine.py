"""The engine: continuous batching of requests over a model and a cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from kvjax.engine.backing import Backing
from kvjax.engine.extents import check_swappable, compactor_of
from kvjax.engine.metrics import Metrics, Recorder
from kvjax.engine.pagemap import PageMap
from kvjax.engine.request import Event, FinishReason, Request, Result, token_ids
from kvjax.engine.runner import Runner
from kvjax.engine.scheduler import Scheduler, Share
from kvjax.engine.sequence import NO_ROW, Generation, Sequence
from kvjax.engine.servable import why_not
from kvjax.engine.speculation import Drafter, NoDrafts
from kvjax.engine.steps import Report
from kvjax.engine.swap import Swap, pages_to_restore
from kvjax.engine.text import Decode, TextStream
from kvjax.inputs import static_size
from kvjax.models.protocol import Model
from kvjax.pages import PageTable
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
      max_prefixes: prefixes that may be registered to be shared; each has a row of its own.
      preemption: what becomes of the pages of a request that gives way: "recompute" drops them, "swap" moves them to
        the host and back.
      host_bytes: host memory that swapped pages may take, for "swap"; who finds no room there is recomputed.
      drafter: who guesses tokens ahead; see `speculation`.  The tokens are the same, whoever does.
      on_tokens: called with (request id, new tokens) as they come, while the device works on; from a thread of the
        runtime, and perhaps with tokens past a stop string, which end up in no result.  What it raises, `step` raises
        once the step is done; until then it is not called again.
      smallest_bucket: batches are padded to powers of two from here up: fewer compilations, more padding.
      decode: token ids → text; needed for stop strings and text in results.
      clock: seconds, monotonic.
      mirror: keep the page table on the host too (see `Engine.table`); for caches with pages.
      page_map: records who owns which page after every step, from such a mirror.

    Raises:
      ValueError: a size below 1, a negative max_prefixes, swapping without host_bytes, or swapping or a page map
        without pages.
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
        preemption: Literal["recompute", "swap"] = "recompute",
        host_bytes: int | None = None,
        drafter: Drafter | None = None,
        on_tokens: Callable[[int, tuple[int, ...]], None] | None = None,
        smallest_bucket: int = 1,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.perf_counter,
        mirror: bool = False,
        page_map: PageMap | None = None,
    ):
        max_seqs = static_size("max_seqs", max_seqs)
        chunk, burst = static_size("chunk", chunk), static_size("burst", burst)
        smallest_bucket = static_size("smallest_bucket", smallest_bucket)
        max_prefixes = static_size("max_prefixes", max_prefixes, least=0)
        if (mirror or page_map is not None) and not backing.has_page_table:
            raise ValueError("a mirror or page map shows the pages of a paged cache; this one has none")
        drafter = NoDrafts() if drafter is None else drafter
        if isinstance(drafter, type) or not hasattr(drafter, "serve_with"):
            raise TypeError(f"{drafter=} drafts nothing; pass PromptLookup(), DraftModel(model) or the like")
        if on_tokens is not None and not callable(on_tokens):
            raise TypeError(f"{on_tokens=} cannot be called; pass a function of (request id, tokens)")
        if host_bytes is not None and preemption != "swap":
            raise ValueError(f"{host_bytes=} is for preemption='swap'; this engine's is {preemption!r}")
        self._why_not = partial(why_not, vocabulary=model.vocabulary, backing=backing, has_text=decode is not None)
        self._backing = backing
        self._max_prefixes = max_prefixes
        self._decode = decode
        self._clock = clock
        self._page_map = page_map
        self._on_tokens = on_tokens
        self._stream_problem: Exception | None = None
        model = drafter.serve_with(model)
        # One row more than registered prefixes need: only the first group in the queue ever computes its own.
        prefix_rows = max_prefixes + 1 if backing.shares_pages else 0
        self._scheduler = Scheduler(
            backing, max_seqs=max_seqs, prefix_rows=prefix_rows, chunk=chunk, burst=burst * (drafter.tokens + 1)
        )
        self._max_seqs = max_seqs
        self._runner = Runner(
            model,
            backing,
            rows=max_seqs + prefix_rows,
            max_seqs=max_seqs,
            burst=burst,
            smallest_bucket=smallest_bucket,
            drafter=drafter,
            stream=None if on_tokens is None else self._stream,
            mirrored=mirror or page_map is not None,
            clock=clock,
        )
        self._swap = self._make_swap(preemption, host_bytes)
        self._recorder = Recorder(
            num_pages=backing.num_pages,
            page_size=backing.page_size,
            bytes_per_token=model.spec.bytes_per_token,
        )
        self._compactor = compactor_of(backing, self._runner, self._recorder)
        self._ids = count()
        self._unfinished: dict[int, Generation] = {}
        self._cancelled: set[int] = set()
        self._events: list[Event] = []
        self.results: dict[int, Result] = {}

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, is on its way to the host, or remains to be told."""
        return not (self._unfinished or self._events or self._arriving)

    @property
    def table(self) -> PageTable:
        """The page table as it stands after the last step, on the host; the device is not asked for it.

        Raises:
          ValueError: the engine keeps no mirror.
        """
        if self._runner.mirror is None:
            raise ValueError("this engine keeps no page table on the host; make it with mirror=True")
        return self._runner.mirror.table

    @property
    def compiled(self) -> list[tuple[str, int]]:
        """(function, bucket) of every compilation so far."""
        return self._runner.executables.compiled

    def submit(self, request: Request) -> int:
        """Queues a request and returns its id.

        One that can never be served ends with finish_reason "error" at once; everybody else goes on.

        Raises:
          TypeError: not a `Request`.
        """
        self._check_kind(request)
        return self._submit([request])[0]

    def submit_samples(self, request: Request, number: int) -> tuple[int, ...]:
        """Queues `number` samples of one request, with the seeds request.seed, request.seed + 1, …; returns their ids.

        Their tokens are those of as many requests with these seeds.  What differs is the cost: the prompt is computed
        once but for its last token, and its pages are shared; a partly filled one is copied when a sample writes to it.
        They start together, and give way and come back together, so there can be no more than `max_seqs` of them.  A
        contiguous cache shares nothing: there they are requests like others.

        Raises:
          TypeError: not a `Request`.
          ValueError: `number` is not from 1 to max_seqs, or a seed would pass 2**32 − 1.
        """
        number = static_size("number", number)
        if number > self._max_seqs:
            raise ValueError(f"{number=} samples cannot run at once; raise max_seqs={self._max_seqs} or ask for fewer")
        self._check_kind(request)
        return self._submit([replace(request, seed=request.seed + index) for index in range(number)])

    def add_prefix(self, tokens: Ordered[int]) -> None:
        """Lets requests that begin with `tokens` share one computation and one copy of them.

        The prefix is computed when the first such request is admitted.  Its pages are given up when they are needed and
        nobody uses them, and computed again later.  A contiguous cache shares nothing: there the call has no effect.

        Raises:
          ValueError: an empty prefix, one that does not fit the cache, or more prefixes than `max_prefixes`.
        """
        prefix = token_ids("a shared prefix", tokens)
        if not prefix:
            raise ValueError("a shared prefix needs at least one token")
        problem = self._why_not(Request(prefix))
        if problem is not None:
            raise ValueError(f"a shared prefix is a prompt too: {problem}")
        registered = self._scheduler.prefixes.registered
        if not self._backing.shares_pages or prefix in registered:
            return
        if len(registered) == self._max_prefixes:
            raise ValueError(f"max_prefixes={self._max_prefixes} prefixes are shared already; raise max_prefixes")
        registered.append(prefix)

    def cancel(self, request: int) -> bool:
        """Ends a request before the next step, wherever it is; False if it has finished already or never was.

        May be called while events are read and from another thread.
        """
        if request not in self._unfinished:
            return False
        self._cancelled.add(request)
        return True

    def run(self, on_event: Callable[[Event], None] | None = None) -> list[Result]:
        """Steps until idle; returns the results of all requests so far, by id.

        What `on_event` raises ends the call.  The events after the one it was given then wait for the next `step` or
        `run`, and nothing is lost.
        """
        while not self.idle:
            events = deque(self.step())
            try:
                while events:
                    event = events.popleft()
                    if on_event is not None:
                        on_event(event)
            finally:
                self._events[:0] = events
        return [self.results[number] for number in sorted(self.results)]

    def step(self) -> list[Event]:
        """Runs one step; returns what happened to whom."""
        self._serve_cancellations()
        self._admit()
        shares = self._scheduler.plan()
        if shares:
            self._serve(shares)
        events, self._events = self._events, []
        return events

    def metrics(self) -> Metrics:
        """What it cost so far."""
        return self._recorder.summary(compile_seconds=self._runner.executables.compile_seconds)

    @staticmethod
    def _check_kind(request: Request) -> None:
        if not isinstance(request, Request):
            raise TypeError(f"the engine serves kvjax.engine.Request, not {type(request).__name__}")

    def _make_swap(self, preemption: str, host_bytes: int | None) -> Swap | None:
        if preemption == "recompute":
            return None
        if preemption != "swap":
            raise ValueError(f"{preemption=} must be 'recompute' or 'swap'")
        if not self._backing.has_page_table:
            raise ValueError("preemption='swap' moves pages through a page table on the device; this cache has none")
        check_swappable(self._backing)
        if host_bytes is None:
            raise ValueError("preemption='swap' needs host_bytes, the host memory that swapped pages may take")
        return Swap(self._runner, page_size=self._backing.page_size, limit=static_size("host_bytes", host_bytes))

    def _submit(self, requests: Ordered[Request]) -> tuple[int, ...]:
        """Queues requests, as one group of samples if there are several and the cache can share."""
        problem = self._why_not(requests[0])
        numbers = tuple(next(self._ids) for _ in requests)
        for number, request in zip(numbers, requests, strict=True):
            self._recorder.submitted(number, len(request.prompt), self._now())
            generation = Generation(
                list(request.prompt),
                order=number,
                id=number,
                group=numbers[0] if self._backing.shares_pages else number,
                request=request,
                limit=min(request.max_new_tokens, self._backing.max_context - len(request.prompt)),
                text=None if self._decode is None else TextStream(self._decode, request.stop),
            )
            self._unfinished[number] = generation
            if problem is None:
                self._scheduler.waiting.append(generation)
            else:
                self._fail(generation, problem)
        return numbers

    def _admit(self) -> None:
        """Lets in who fits, and lets go of prefixes of samples that have taken over the pages."""
        self._collect()
        admitted = self._scheduler.admit(self._runner.free)
        self._runner.fork([one for unit in admitted for one in unit if one.holder is not None])
        for unit in admitted:
            generations = [one for one in unit if isinstance(one, Generation)]
            if generations and generations[0].saved is not None:
                assert self._swap is not None
                self._swap.restore(generations)
                self._recorder.resumed_by_swap += len(generations)
            else:
                self._recorder.resumed_by_recompute += sum(one.preempted > 0 for one in generations)
        self._leave(self._scheduler.unneeded())

    def _collect(self) -> None:
        """Frees the pages that have arrived on the host; waits for them, and makes do without, if nobody runs."""
        if self._swap is None:
            return
        alone = not self._scheduler.running
        self._swap.collect(wait=alone)
        unit = self._scheduler.next_unit()
        # If nobody runs, nobody will give pages back.  Prefixes may leave a unit no room; then it is computed anew.
        if alone and unit and unit[0].saved and pages_to_restore(unit, self._backing.page_size) > self._runner.free:
            for one in unit:
                self._swap.forget(one)

    def _leave(self, sequences: Ordered[Sequence]) -> None:
        """Takes sequences off their rows for good, or out of the queue."""
        self._runner.release([one for one in sequences if one.row != NO_ROW])
        for one in sequences:
            self._scheduler.remove(one)
            if self._swap is not None and isinstance(one, Generation):
                self._swap.forget(one)

    def _serve(self, shares: list[Share]) -> None:
        sampling = [
            share.sequence
            for share in shares
            if isinstance(share.sequence, Generation) and share.count == share.sequence.pending
        ]
        bursting = len(sampling) == len(shares) and all(share.count == 1 for share in shares)
        if bursting:
            report = self._runner.burst(sampling, yield_early=bool(self._scheduler.waiting))
            self._recorder.bursts += 1
        else:
            report = self._runner.mixed(shares, sampling)
            self._recorder.steps += 1
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
        if self._compactor is not None:
            self._compactor.look()
        if self._on_tokens is not None:
            if not bursting:
                self._runner.bursting = tuple(sampling)
                self._stream(report.tokens, report.produced)
            problem, self._stream_problem = self._stream_problem, None
            if problem is not None:
                raise problem

    def _stream(self, tokens: ArrayLike, count: ArrayLike) -> None:
        """Tells of one step of a burst while the burst goes on."""
        assert self._on_tokens is not None
        tokens, count = np.asarray(tokens), np.asarray(count)
        for slot, generation in enumerate(self._runner.bursting):
            if count[slot] and self._stream_problem is None:
                try:
                    self._on_tokens(generation.id, tuple(tokens[slot, : count[slot]].tolist()))
                except (
                    Exception
                ) as error:  # raised by `step`: an exception here would cost the device call, and the cache
                    self._stream_problem = error

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
        lacking = (Status.OUT_OF_PAGES, Status.PAGES_PENDING, Status.FRAGMENTED)
        status = report.status
        raise_for_status([Status.OK if code in lacking else code for code in status], operation="reserve")
        refused = next((share for share in shares if status[share.sequence.row] in lacking), None)
        if refused is None:
            return
        if status[refused.sequence.row] == Status.FRAGMENTED:
            self._mend(refused.sequence)
            return
        if self._swap is not None:
            self._swap.collect(wait=True)  # for pages of those who gave way before
        gave_way = False
        while self._runner.free + self._arriving < self._scheduler.shortage(refused):
            victims = self._scheduler.give_way()
            if not victims:
                # Giving way may free no page and still help: one that is no longer shared need not be copied.
                if not gave_way and self._runner.free == report.free:
                    self._give_up(refused.sequence, "is full")
                return
            self._preempt(victims)
            gave_way = True
            if any(victim is refused.sequence for victim in victims):
                return

    def _mend(self, sequence: Sequence) -> None:
        """Moves pages for a sequence that lies in too many runs; where that does not help, the newest gives way."""
        assert self._compactor is not None
        if self._compactor.compact():
            return
        if victims := self._scheduler.give_way():
            self._preempt(victims)
        else:
            self._give_up(sequence, "has its pages in more runs than its list holds, whose max_runs is too small,")

    def _preempt(self, victims: Ordered[Sequence]) -> None:
        """Takes victims off their rows, their pages to the host if that is wanted and there is room."""
        generations = [one for one in victims if isinstance(one, Generation)]
        saved = self._swap.save(generations) if self._swap is not None and generations else None
        if self._swap is not None and saved is None:
            self._recorder.swaps_refused += sum(one.computed > 0 for one in generations)
        if self._swap is not None and saved is not None:
            self._recorder.swapped_pages += saved.number
            self._recorder.swapped_bytes += saved.number * self._swap.page_bytes
        self._runner.release(victims)
        self._scheduler.preempt(victims)
        for one in generations:
            one.saved = saved
        self._recorder.preemptions += len(generations)
        self._recorder.prefixes_dropped += len(victims) - len(generations)

    @property
    def _arriving(self) -> int:
        """Pages that will be free once they have arrived on the host."""
        return 0 if self._swap is None else self._swap.arriving

    def _give_up(self, sequence: Sequence, why: str) -> None:
        """Ends a request that has the whole pool to itself and does not fit."""
        assert isinstance(sequence, Generation), "a prefix that fits the pool was refused an empty one"
        pool = f"{self._backing.num_pages} pages of {self._backing.page_size} tokens"
        problem = f"the cache of {pool} {why} after {len(sequence.tokens)} tokens; raise num_pages"
        self._leave([sequence])
        self._fail(sequence, problem)

    def _serve_cancellations(self) -> None:
        while self._cancelled:
            generation = self._unfinished.get(self._cancelled.pop())
            if generation is None:
                continue
            self._leave([generation])
            self._tell(generation, "cancelled")

    def _fail(self, generation: Generation, problem: str) -> None:
        """Ends a request, which holds nothing any more, with an error."""
        generation.problem = problem
        self._tell(generation, "error")

    def _tell(self, generation: Generation, reason: FinishReason, new: tuple[int, ...] = ()) -> None:
        """Records a request's end and its last event."""
        del self._unfinished[generation.id]
        rest = generation.finish_text()
        result = generation.result(reason)
        self.results[generation.id] = result
        self._recorder.finished(result.finish_reason)
        self._events.append(Event(generation.id, new, rest, result))

    def _observe(self) -> None:
        """Records what the pool holds after a step, before anybody leaves it."""
        now, scheduler = self._now(), self._scheduler
        mapped = self._backing.num_pages - self._runner.free
        self._recorder.stepped(
            mapped_pages=mapped,
            unshared_pages=scheduler.unshared_pages(),
            useful_tokens=scheduler.useful_tokens(),
            now=now,
        )
        if self._page_map is not None:
            labels = {holder.row: label for label, holder in scheduler.prefixes.labelled()}
            labels |= {one.row: f"request {one.id}" for one in scheduler.running}
            self._page_map.record(self.table, labels, now)

    def _now(self) -> float:
        """Seconds by the clock, as if compilation took no time."""
        return self._clock() - self._runner.executables.compile_seconds
