"""Who owns a page: the table, its transitions and invariants.  Not one K/V byte here."""

from kvjax.pages.epochs import AdvanceInfo, advance
from kvjax.pages.grow import Info, PageCopy, ReserveInfo, commit, pages_needed, reserve
from kvjax.pages.invariants import check_invariants
from kvjax.pages.pins import PinInfo, pin, unpin
from kvjax.pages.share import adopt, fork, reorder
from kvjax.pages.shrink import release, rewind, truncate
from kvjax.pages.status import Fault, PageTableError, Status, raise_for_faults, raise_for_status
from kvjax.pages.table import GroupPages, GroupShape, PageTable, make_page_table

__all__ = [
    "AdvanceInfo",
    "Fault",
    "GroupPages",
    "GroupShape",
    "Info",
    "PageCopy",
    "PageTable",
    "PageTableError",
    "PinInfo",
    "ReserveInfo",
    "Status",
    "adopt",
    "advance",
    "check_invariants",
    "commit",
    "fork",
    "make_page_table",
    "pages_needed",
    "pin",
    "raise_for_faults",
    "raise_for_status",
    "release",
    "reorder",
    "reserve",
    "rewind",
    "truncate",
    "unpin",
]
