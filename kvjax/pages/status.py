"""What a transition says of each row, and how the host turns a refusal into an exception."""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np


class Status(IntEnum):
    """Why a row was served or refused.  A refused row is unchanged in every group."""

    OK = 0
    OUT_OF_PAGES = 1
    """Not enough pages, even if every page in limbo came back."""
    PAGES_PENDING = 2
    """Not enough free pages now; pages in limbo would suffice once `advance` frees them."""
    TABLE_FULL = 3
    """The row's page table has no column left for the tokens."""
    OVER_BOUND = 4
    """The call's static bound (`max_tokens` or `max_pages`) leaves no room for this row; use a larger one."""
    NOT_RESERVED = 5
    """The positions were never reserved, or lie beyond the committed length."""
    RESERVED = 6
    """The parent row has reserved positions that are not committed; commit or truncate it first."""
    ROW_BUSY = 7
    """The row already holds pages; release it first."""
    EMPTY = 8
    """The row holds nothing."""
    STALE = 9
    """A page that nobody holds, or an epoch that is not open to completion."""
    FRAGMENTED = 10
    """The row's pages would lie in more runs than its list holds; of extents only."""
    SHARED = 11
    """Pages past the new length have other holders, so the row may not keep them to write."""


class Fault(IntFlag):
    """Sticky bits in `PageTable.faults`: something that correct use of the transitions cannot produce."""

    UNDERFLOW = 1
    """A holder was dropped from a page that had none."""
    FREE_PAGE_HELD = 2
    """A page came out of the free ring although somebody held it."""
    MAPPED_PAGE_UNHELD = 4
    """A row maps a page that no one holds, or an entry that is no page."""
    COMMIT_REFUSED = 8
    """`kvjax.commit` was given more tokens than were granted."""


class PageTableError(RuntimeError):
    """A refused transition, raised on the host by `raise_for_status`."""


def raise_for_status(status: Any, *, operation: str = "transition", allow: Collection[Status] = ()) -> None:
    """Raises PageTableError naming each refused row, the reason and the repair.

    Args:
      status: Int32[rows], as found in an info or a grant.  Waits for the device.
      operation: what to call it in the message.
      allow: reasons to pass over beside OK; EMPTY, for instance, where a row may have been released before.
    """
    if hasattr(status, "status"):
        raise TypeError(f"raise_for_status takes codes, not {type(status).__name__}; pass its .status")
    codes = [Status(int(code)) for code in np.asarray(status).reshape(-1)]
    refused = [(row, code) for row, code in enumerate(codes) if code != Status.OK and code not in allow]
    if refused:
        listing = ", ".join(f"row {row}: {code.name}" for row, code in refused[:8])
        more = f" and {len(refused) - 8} more" if len(refused) > 8 else ""
        repairs = " ".join(_REPAIR[code] for code in dict.fromkeys(code for _, code in refused))
        raise PageTableError(f"{operation} refused {listing}{more}; these rows are unchanged. {repairs}")


def raise_for_faults(faults: Any) -> None:
    """Raises PageTableError if sticky fault bits are set, naming them.  Waits for the device."""
    found = Fault(int(faults))
    if found:
        raise PageTableError(
            f"the page table is no longer sound: faults {found!r}.  The cache was changed other than by its "
            "transitions, or committed more than was granted.  Build a new one; check_invariants says what broke"
        )


_REPAIR = {
    Status.OUT_OF_PAGES: "Release rows or build the cache with more pages.",
    Status.PAGES_PENDING: "Call advance once the steps in flight are complete.",
    Status.TABLE_FULL: "Build the cache with a larger max_context.",
    Status.OVER_BOUND: "Use a larger max_tokens or max_pages, and counts of at least 0.",
    Status.NOT_RESERVED: "Commit at most what was reserved; truncate to at most the committed length.",
    Status.RESERVED: "Commit or truncate the parent first.",
    Status.ROW_BUSY: "Release the row first.",
    Status.EMPTY: "A row without tokens can be neither released nor forked.",
    Status.STALE: "Pin pages for as long as their ids are kept.",
    Status.FRAGMENTED: "Compact the extents, or build them with a larger max_runs or span.",
    Status.SHARED: "Truncate the row instead: that drops its pages.",
}
