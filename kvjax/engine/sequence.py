"""The host's record of a row: which tokens are known, and how many of them the cache holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvjax.engine.request import FinishReason, Request, Result
from kvjax.engine.text import TextStream

NO_ROW = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that stand, or want to stand, in one row of the cache.

    Attributes:
      tokens: all that are known so far.
      order: priority; the smallest is served first and gives way last.
      row: its row in the cache; `NO_ROW` while it has none.
      computed: tokens the cache holds for it.
    """

    tokens: list[int]
    order: int
    row: int = NO_ROW
    computed: int = 0

    @property
    def pending(self) -> int:
        """Known tokens that the cache does not hold yet."""
        return len(self.tokens) - self.computed

    def horizon(self, burst: int) -> int:
        """Tokens the cache will hold for it after `burst` more steps, once it has caught up."""
        return len(self.tokens)

    def held_pages(self, page_size: int) -> int:
        """Pages it maps and may write without a copy, and those before them."""
        return pages_for(self.computed, page_size)


@dataclass(eq=False, slots=True)
class Holder(Sequence):
    """A shared prefix in a row of its own.  It generates nothing; it keeps the prefix's pages alive."""


@dataclass(eq=False, slots=True)
class Generation(Sequence):
    """A request on its way: its tokens are the prompt and what was generated.

    Attributes:
      id, request: from `Engine.submit`.
      limit: tokens it may generate: what was asked, or fewer if the context ends first.
      text: its text so far; None without a decoder.
      margins: one a generated token; see `Result`.
      holder: the prefix whose pages it took over; None if it has all its pages to itself.
      preempted: times it lost its row.
    """

    id: int = 0
    request: Request = field(kw_only=True)
    limit: int = 0
    text: TextStream | None = None
    margins: list[float] = field(default_factory=list)
    holder: Holder | None = None
    preempted: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        return self.limit - len(self.margins)

    def horizon(self, burst: int) -> int:
        # The last token to be generated is never computed.
        return len(self.tokens) - 1 + max(1, min(burst, self.remaining))

    def held_pages(self, page_size: int) -> int:
        # A partly filled page that is still shared will be copied when it is first written.
        copies = self.holder is not None and self.computed == len(self.holder.tokens) and self.computed % page_size
        return pages_for(self.computed, page_size) - bool(copies)

    def shared_tokens(self, page_size: int) -> int:
        """Tokens it holds in whole pages of its prefix, which are never copied."""
        return 0 if self.holder is None else len(self.holder.tokens) // page_size * page_size

    def take(self, tokens: list[int], margins: list[float]) -> FinishReason | None:
        """Appends sampled tokens up to the one that ends the request; says why it ended, if it did.

        Stop strings are seen here and not on the device, so a burst may bring tokens past the end: they are dropped.
        """
        for token, margin in zip(tokens, margins, strict=True):
            self.tokens.append(token)
            self.margins.append(margin)
            if self.text is not None and self.text.push(token):
                return "stop"
            if token in self.request.eos:
                return "stop"
            if self.remaining == 0:
                return "length"
        return None

    def leave_row(self) -> None:
        """Forgets everything the cache held."""
        self.row, self.computed, self.holder = NO_ROW, 0, None

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        return Result(
            id=self.id,
            request=self.request,
            tokens=tuple(self.generated),
            margins=tuple(self.margins),
            text=None if self.text is None else self.text.text,
            finish_reason=reason,
            error=error,
        )


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` tokens fill."""
    return -(-tokens // page_size)
