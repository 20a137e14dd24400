"""Who owns a page: the table, its transitions and invariants.  Not one K/V byte here."""

from kvjax.pages.status import Fault, PageTableError, Status, raise_for_status

__all__ = ["Fault", "PageTableError", "Status", "raise_for_status"]
