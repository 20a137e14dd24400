"""What a virtual space counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counted as it happens.

    Attributes:
      steps: calls of `step`.
      stalls: steps that had to map, or wait for a mapping, before they could go on.
      map_calls, unmap_calls: asked of the platform.
      mapped_pages: page-groups mapped by these calls.
      ahead_calls: those of `map_calls` made by the background thread.
      map_seconds: time spent in `map_calls` and `unmap_calls`.
      ahead_seconds: the part of it spent by the background thread.
      copies: page-groups copied because a shared one was to be written.
      refusals: rows that a step refused.
      reclaimed_rows: parked rows that were given up.
      reused_pages: page-groups that a new request found mapped.
    """

    steps: int = 0
    stalls: int = 0
    map_calls: int = 0
    unmap_calls: int = 0
    mapped_pages: int = 0
    ahead_calls: int = 0
    map_seconds: float = 0.0
    ahead_seconds: float = 0.0
    copies: int = 0
    refusals: int = 0
    reclaimed_rows: int = 0
    reused_pages: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """A virtual space at one moment.

    Attributes:
      counters: what has been counted so far.
      reserved_bytes: addresses reserved.
      resident_bytes: memory committed, by the platform's own account.
      useful_bytes: committed tokens of rows in use; a shared token counts for each row.
      held_bytes: page-groups that rows in use hold, each once, however many hold it.
      parked_bytes: page-groups that finished rows keep mapped.
      free_bytes: page-groups nobody holds, those in limbo included.
      wasted_tail_bytes: held past the rows' committed tokens: the rest of last page-groups, and what is mapped ahead.
    """

    counters: Counters
    reserved_bytes: int
    resident_bytes: int
    useful_bytes: int
    held_bytes: int
    parked_bytes: int
    free_bytes: int
    wasted_tail_bytes: int
