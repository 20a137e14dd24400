"""Who runs: admission, the tokens of each step, and who gives way when pages run out.  Plain Python, no arrays.

First come, first served throughout.  Requests are admitted in order of arrival, served in that order by `reserve`, and
give way in the reverse order; so the oldest always gets on, and nobody starves.  A preempted request goes back to the
front of the queue with what it has generated as part of its prompt.

The unit of admission and preemption is a request, or a group of parallel samples, which share pages: they come together
and go together.  Only a group that has the pool to itself and outgrows it is split: its newest sample then goes on
alone, later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import takewhile

from kvjax.engine.backing import Backing
from kvjax.engine.prefixes import Prefixes, Tokens
from kvjax.engine.sequence import NO_ROW, Generation, Holder, Sequence, pages_for


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens that one sequence computes in a step."""

    sequence: Sequence
    count: int


class Scheduler:
    """The queue, the rows, and the prefixes that requests share.

    Rows 0 … max_seqs − 1 are for requests, the `prefix_rows` after them for prefixes.
    """

    def __init__(self, backing: Backing, *, max_seqs: int, prefix_rows: int, chunk: int, burst: int):
        self._backing = backing
        self._chunk = chunk
        self._burst = burst
        self._free_rows = list(reversed(range(max_seqs)))
        self.prefixes = Prefixes(range(max_seqs, max_seqs + prefix_rows))
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []

    @property
    def residents(self) -> list[Sequence]:
        """Everything that stands in a row."""
        return [*self.running, *self.prefixes.resident.values()]

    @property
    def active(self) -> list[Sequence]:
        """Sequences in rows that have tokens to compute, in order."""
        return sorted((one for one in self.residents if one.pending), key=lambda one: one.order)

    def admit(self, free: int) -> list[list[Sequence]]:
        """Gives rows to waiting units for as long as `free` pages last; returns those that got them.

        A unit comes in only if, beside it, everybody can finish the next burst; otherwise it would soon be thrown out
        again.  If it begins with a prefix that is not resident, the prefix goes first and the unit waits for it.

        Prefixes that begin in their rows with a shorter one's pages are returned too, each by itself.
        """
        admitted: list[list[Sequence]] = []
        before = set(self.prefixes.resident)
        promised = sum(self._growth(sequence) for sequence in self.active)
        while self.waiting:
            unit = self.next_unit()
            if len(unit) > len(self._free_rows):
                break
            prefix = self._prefix_of(unit)
            needed = self._needed(unit, prefix)
            if promised + needed > free and self.running:
                break
            promised += needed
            if prefix is not None:
                holder = self.prefixes.open(prefix, unit[0].order)
                if holder is None or holder.pending:
                    break
                for one in unit:
                    one.holder, one.computed = holder, holder.computed
            for one in unit:
                one.row = self._free_rows.pop()
                self.running.append(self.waiting.popleft())
            admitted.append([*unit])
        for tokens, holder in self.prefixes.resident.items():
            if tokens not in before and holder.holder is not None:
                admitted.append([holder])
        return admitted

    def unneeded(self) -> list[Holder]:
        """Prefixes of samples that the next unit in the queue does not wait for."""
        return self.prefixes.unneeded(self._prefix_of(self.next_unit()) if self.waiting else None)

    def next_unit(self) -> list[Generation]:
        """Who is first in the queue; empty if nobody waits."""
        return list(takewhile(lambda one: one.group == self.waiting[0].group, self.waiting))

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

    def give_way(self) -> list[Sequence]:
        """Whose pages to take: a prefix nobody uses, else the newest unit, else a prefix whose users run alone, else
        the newest of samples that run alone.

        Empty if a single sequence has the whole pool to itself.
        """
        complete, active = self.prefixes.complete, self.active
        used = {one.holder for one in self.residents}
        idle = [holder for holder in complete if holder not in used]
        newest = self._unit_of(active[-1])
        if idle:
            return [idle[0]]
        if len(newest) < len(active):
            return newest
        if complete:
            return [complete[0]]
        return newest[-1:] if len(newest) > 1 else []

    def preempt(self, victims: Ordered[Sequence]) -> None:
        """Takes what `give_way` named off its rows, once the pages are released; requests go to the queue's front."""
        for one in reversed(victims):
            self.remove(one)
            if isinstance(one, Generation):
                one.leave_row()
                one.preempted += 1
                self.waiting.appendleft(one)
        for one in victims:
            if isinstance(one, Generation) and any(other.group == one.group for other in self.running):
                one.group = one.id

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence off its row for good, or out of the queue."""
        if isinstance(sequence, Holder):
            self.prefixes.remove(sequence)
        elif isinstance(sequence, Generation) and sequence.row == NO_ROW:
            self.waiting.remove(sequence)
        elif isinstance(sequence, Generation):
            self.running.remove(sequence)
            self._free_rows.append(sequence.row)

    def useful_tokens(self) -> int:
        """Tokens that the cache holds, those in shared pages counted once."""
        size = self._backing.page_size
        total = sum(one.computed - one.shared_tokens(size) for one in self.residents)
        # Prefixes that lost their rows, and the tokens in those of their pages that somebody took over.
        kept: dict[Holder, int] = {}
        open_ends = self.residents
        while open_ends:
            one = open_ends.pop()
            holder = one.holder
            if holder is not None and holder not in self.prefixes.resident.values():
                if holder not in kept:
                    open_ends.append(holder)
                kept[holder] = max(kept.get(holder, 0), one.shared_tokens(size))
        return total + sum(tokens - holder.shared_tokens(size) for holder, tokens in kept.items())

    def unshared_pages(self) -> int:
        """Pages that the running requests would hold if each had its own."""
        return sum(self._pages(one.computed) for one in self.running)

    def _unit_of(self, sequence: Sequence) -> list[Sequence]:
        if not isinstance(sequence, Generation):
            return [sequence]
        return [one for one in self.running if one.group == sequence.group]

    def _prefix_of(self, unit: Ordered[Generation]) -> Tokens | None:
        """What the unit takes over from a prefix; nothing if it comes back from the host."""
        return self.prefixes.of(unit) if unit[0].saved is None else None

    def _needed(self, unit: Ordered[Generation], prefix: Tokens | None) -> int:
        """Pages a unit takes until the end of the next burst, its prefix included unless it is resident."""
        needed = sum(self._pages(one.horizon(self._burst)) for one in unit)
        saved = unit[0].saved
        if saved is not None:
            return needed - (len(unit) - 1) * saved.shared
        if prefix is None:
            return needed
        shared = len(prefix) // self._backing.page_size
        return needed - len(unit) * shared + (0 if prefix in self.prefixes.resident else self._pages(len(prefix)))

    def _growth(self, sequence: Sequence) -> int:
        """Pages it may take until the end of the next burst."""
        return self._pages(sequence.horizon(self._burst)) - sequence.held_pages(self._backing.page_size)

    def _pages(self, tokens: int) -> int:
        return pages_for(tokens, self._backing.page_size)


def _decodes(sequence: Sequence) -> bool:
    return isinstance(sequence, Generation) and sequence.pending == 1
