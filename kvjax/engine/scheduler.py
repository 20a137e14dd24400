"""Who runs: admission, the tokens of each step, and who gives way when pages run out.  Plain Python, no arrays.

First come, first served throughout.  Requests are admitted in order of arrival, served in that order by `reserve`, and
give way in the reverse order; so the oldest always gets on, and nobody starves.  A preempted request goes back to the
front of the queue with what it has generated as part of its prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvjax.engine.backing import Backing
from kvjax.engine.sequence import NO_ROW, Generation, Holder, Sequence, pages_for


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens that one sequence computes in a step."""

    sequence: Sequence
    count: int


class Scheduler:
    """The queue, the rows, and the prefixes that requests share.

    Rows 0 … max_seqs − 1 are for requests; prefix i, where it is resident, stands in row max_seqs + i.
    """

    def __init__(self, backing: Backing, *, max_seqs: int, chunk: int, burst: int):
        self._backing = backing
        self._chunk = chunk
        self._burst = burst
        self._free_rows = list(reversed(range(max_seqs)))
        self._max_seqs = max_seqs
        self.prefixes: list[tuple[int, ...]] = []
        self.holders: dict[int, Holder] = {}
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def active(self) -> list[Sequence]:
        """Sequences in rows that have tokens to compute, in order."""
        residents = (*self.running, *self.holders.values())
        return sorted((one for one in residents if one.pending), key=lambda one: one.order)

    def admit(self, free: int) -> list[Generation]:
        """Gives rows to waiting requests for as long as `free` pages last; returns those that got one.

        A request comes in only if, beside it, everybody can finish the next burst; otherwise it would soon be thrown
        out again.  If it begins with a prefix that is not resident, the prefix goes first and the request waits for it.
        """
        admitted = []
        promised = sum(self._growth(sequence) for sequence in self.active)
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            prefix = self._prefix_of(request)
            needed = self._pages(request.horizon(self._burst))
            if prefix is not None:
                needed -= len(self.prefixes[prefix]) // self._backing.page_size
                needed += 0 if prefix in self.holders else self._pages(len(self.prefixes[prefix]))
            if self.running and promised + needed > free:
                break
            promised += needed
            if prefix is not None:
                holder = self.holders.setdefault(
                    prefix, Holder(list(self.prefixes[prefix]), request.order, row=self._max_seqs + prefix)
                )
                if holder.pending:
                    break
                request.holder, request.computed = holder, len(holder.tokens)
            request.row = self._free_rows.pop()
            self.running.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def plan(self) -> list[Share]:
        """The tokens of the next step: one for everybody who decodes, and of prompts as many as the chunk still holds.

        At least one prompt token is always among them if there is any.
        """
        active = self.active
        decoding = sum(_decodes(sequence) for sequence in active)
        budget = max(1, self._chunk - decoding)
        shares = []
        for sequence in active:
            count = 1 if _decodes(sequence) else min(sequence.pending, budget)
            budget -= 0 if _decodes(sequence) else count
            if count:
                shares.append(Share(sequence, count))
        return shares

    def shortage(self, refused: Share) -> int:
        """Pages that must be free for a refused share to fit."""
        sequence, size = refused.sequence, self._backing.page_size
        return self._pages(sequence.computed + refused.count) - sequence.held_pages(size)

    def give_way(self) -> Sequence | None:
        """Whose pages to take: a prefix nobody uses, else the newest sequence, else a prefix whose user runs alone.

        None if a single sequence has the whole pool to itself.
        """
        resident = [holder for holder in self.holders.values() if not holder.pending]
        idle = [holder for holder in resident if all(one.holder is not holder for one in self.running)]
        active = self.active
        if idle:
            return idle[0]
        if len(active) > 1:
            return active[-1]
        return resident[0] if resident else None

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence off its row, once its pages are released; a request waits at the front of the queue."""
        self.remove(sequence)
        if isinstance(sequence, Generation):
            sequence.leave_row()
            sequence.preempted += 1
            self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence off its row for good, or out of the queue."""
        if isinstance(sequence, Holder):
            self.holders = {prefix: holder for prefix, holder in self.holders.items() if holder is not sequence}
        elif isinstance(sequence, Generation) and sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        elif isinstance(sequence, Generation):
            self.running.remove(sequence)
            self._free_rows.append(sequence.row)

    def useful_tokens(self) -> int:
        """Tokens that the cache holds, those in shared pages counted once."""
        size = self._backing.page_size
        own = sum(one.computed - one.shared_tokens(size) for one in self.running)
        resident = sum(holder.computed for holder in self.holders.values())
        dropped = {one.holder: one.shared_tokens(size) for one in self._orphans()}
        return own + resident + sum(dropped.values())

    def _orphans(self) -> Iterator[Generation]:
        """Running requests whose prefix lost its own row; they still share its pages."""
        for one in self.running:
            if one.holder is not None and one.holder not in self.holders.values():
                yield one

    def _prefix_of(self, request: Generation) -> int | None:
        """The longest prefix that the request begins with and goes beyond."""
        fitting = [
            (len(prefix), index)
            for index, prefix in enumerate(self.prefixes)
            if len(prefix) < len(request.tokens) and tuple(request.tokens[: len(prefix)]) == prefix
        ]
        return max(fitting)[1] if fitting else None

    def _growth(self, sequence: Sequence) -> int:
        """Pages it may take until the end of the next burst."""
        return self._pages(sequence.horizon(self._burst)) - sequence.held_pages(self._backing.page_size)

    def _pages(self, tokens: int) -> int:
        return pages_for(tokens, self._backing.page_size)


def _decodes(sequence: Sequence) -> bool:
    return isinstance(sequence, Generation) and sequence.pending == 1
