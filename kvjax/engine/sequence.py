"""The host's record of a row: which tokens are known, and how many of them the cache holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvjax.engine.request import FinishReason, Request, Result
from kvjax.engine.text import DecodeError, TextStream

if TYPE_CHECKING:
    from kvjax.engine.swap import Saved

NO_ROW = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that stand, or want to stand, in one row of the cache.

    Attributes:
      tokens: all that are known so far.
      order: priority; the smallest is served first and gives way last.
      row: its row in the cache; `NO_ROW` while it has none.
      computed: tokens the cache holds for it.
      holder: the prefix whose pages it took over; None if it has all its pages to itself.
    """

    tokens: list[int]
    order: int
    row: int = NO_ROW
    computed: int = 0
    holder: Holder | None = None

    @property
    def pending(self) -> int:
        """Known tokens that the cache does not hold yet."""
        return len(self.tokens) - self.computed

    def horizon(self, burst: int) -> int:
        """Tokens the cache will hold for it after `burst` more steps, once it has caught up."""
        return len(self.tokens)

    def held_pages(self, page_size: int) -> int:
        """Pages it maps and may write without a copy, and those before them."""
        return pages_for(self.computed, page_size) - bool(self._at_prefix_end and self.computed % page_size)

    def shared_pages(self, page_size: int) -> int:
        """Whole pages of its prefix, which are never copied."""
        return 0 if self.holder is None else len(self.holder.tokens) // page_size

    def shared_tokens(self, page_size: int) -> int:
        """Tokens it holds in pages of its prefix."""
        return self.computed if self._at_prefix_end else self.shared_pages(page_size) * page_size

    @property
    def _at_prefix_end(self) -> bool:
        """It has written nothing yet: a partly filled page is still shared, and is copied when it is first written."""
        return self.holder is not None and self.computed == len(self.holder.tokens)


@dataclass(eq=False, slots=True)
class Holder(Sequence):
    """A shared prefix in a row of its own.  It generates nothing; it keeps the prefix's pages alive.

    Its own `holder` is a shorter prefix that it began with.
    """


@dataclass(eq=False, slots=True)
class Generation(Sequence):
    """A request on its way: its tokens are the prompt and what was generated.

    Attributes:
      id, request: from `Engine.submit`.
      group: parallel samples have the same, requests on their own their id.  A group is one unit of scheduling.
      limit: tokens it may generate: what was asked, or fewer if the context ends first.
      text: its text so far; None without a decoder.
      margins: one a generated token; see `Result`.
      preempted: times it lost its row.
      saved: its pages on the host, if they were moved there when it lost its row.
      problem: why it ends with an error, once it does.
    """

    id: int = 0
    group: int = field(kw_only=True)
    request: Request = field(kw_only=True)
    limit: int = 0
    text: TextStream | None = None
    margins: list[float] = field(default_factory=list)
    preempted: int = 0
    saved: Saved | None = None
    problem: str | None = None

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.limit - len(self.margins)

    def horizon(self, burst: int) -> int:
        # The last token to be generated is never computed.
        return len(self.tokens) - 1 + max(1, min(burst, self.remaining))

    def take(self, tokens: list[int], margins: list[float]) -> FinishReason | None:
        """Appends sampled tokens up to the one that ends the request; says why it ended, if it did.

        Stop strings are seen here and not on the device, so a burst may bring tokens past the end: they are dropped.
        A token without a margin was sampled from logits that are not finite; it, or one that `decode` cannot read, is
        an "error", and `problem` says which.
        """
        for token, margin in zip(tokens, margins, strict=True):
            if math.isnan(margin):
                self.problem = f"the model's logits after {len(self.tokens)} tokens are not finite"
                return "error"
            self.tokens.append(token)
            self.margins.append(margin)
            try:
                stopped = self.text is not None and self.text.push(token)
            except DecodeError as error:
                self.problem = str(error)
                return "error"
            if stopped:
                return "stop"
            if token in self.request.eos:
                return "stop"
            if self.remaining == 0:
                return "length"
        return None

    def leave_row(self) -> None:
        """Forgets everything the cache held."""
        self.row, self.computed, self.holder = NO_ROW, 0, None

    def finish_text(self) -> str:
        """The text not yet handed out; where it cannot be decoded, what there is, and `problem` says why."""
        if self.text is None:
            return ""
        try:
            return self.text.finish()
        except DecodeError as error:
            self.problem = str(error)
            return self.text.finish()

    def result(self, reason: FinishReason) -> Result:
        """What the caller gets; a `problem` makes it an error whatever else ended it."""
        return Result(
            id=self.id,
            request=self.request,
            tokens=tuple(self.generated),
            margins=tuple(self.margins),
            text=None if self.text is None else self.text.text,
            finish_reason=reason if self.problem is None else "error",
            error=self.problem,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens fill."""
    return -(-tokens // page_size)
