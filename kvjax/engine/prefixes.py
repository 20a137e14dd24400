"""Prefixes that several requests share: each is computed once, in a row of its own, and its pages are taken over."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from kvjax.engine.sequence import Generation, Holder

Tokens = tuple[int, ...]


class Prefixes:
    """The prefixes that may be shared, and those that stand in rows.

    A registered prefix, once computed, stays until its pages are needed elsewhere.  Parallel samples share their prompt
    but for its last token, after which each samples: that prefix is nobody else's, and leaves its row as soon as the
    samples have taken over its pages.

    Attributes:
      registered: prefixes that any request may begin with.
      resident: those in rows, and how far each is computed, by their tokens.
    """

    def __init__(self, rows: Iterable[int]):
        self._free_rows = sorted(rows, reverse=True)
        self.registered: list[Tokens] = []
        self.resident: dict[Tokens, Holder] = {}

    @property
    def complete(self) -> list[Holder]:
        """Resident prefixes that are computed."""
        return [holder for holder in self.resident.values() if not holder.pending]

    def of(self, unit: Ordered[Generation]) -> Tokens | None:
        """The prefix that a unit takes over: what samples have in common, or else the longest registered one."""
        first = unit[0]
        if len(unit) == 1:
            return self._longest(first.tokens)
        # Samples that come back have their prompt in common; what they generated, each has for itself.
        return first.request.prompt[:-1] or None

    def open(self, prefix: Tokens, order: int) -> Holder | None:
        """The holder to wait for if it has tokens pending, else the prefix's own; None while no row is free.

        A prefix begins with the longest registered one that it goes beyond, and waits for it.
        """
        if prefix in self.resident:
            return self.resident[prefix]
        shorter = self._longest(prefix)
        base = None if shorter is None else self.open(shorter, order)
        if base is not None and base.pending:
            return base
        if not self._free_rows:
            return None
        computed = 0 if base is None else base.computed
        self.resident[prefix] = Holder(list(prefix), order, self._free_rows.pop(), computed, base)
        return self.resident[prefix]

    def remove(self, holder: Holder) -> None:
        """Takes a prefix off its row."""
        del self.resident[tuple(holder.tokens)]
        self._free_rows.append(holder.row)

    def labelled(self) -> list[tuple[str, Holder]]:
        """Resident prefixes with a name each, for people to read."""
        names = {prefix: f"prefix {index}" for index, prefix in enumerate(self.registered)}
        return [(names.get(tokens, f"prompt {holder.order}"), holder) for tokens, holder in self.resident.items()]

    def unneeded(self, wanted: Tokens | None) -> list[Holder]:
        """Prefixes of samples, except the `wanted` one: nobody will take them over any more."""
        return [
            holder for tokens, holder in self.resident.items() if tokens not in self.registered and tokens != wanted
        ]

    def _longest(self, tokens: Ordered[int]) -> Tokens | None:
        """The longest registered prefix that `tokens` begin with and go beyond."""
        fitting = [one for one in self.registered if len(one) < len(tokens) and tuple(tokens[: len(one)]) == one]
        return max(fitting, key=len, default=None)
