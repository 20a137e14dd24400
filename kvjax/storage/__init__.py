"""Where the bytes are: pools, appends, page copies, gathers.  No ownership here."""

from kvjax.storage.pools import Pool, append_tokens, copy_pages, gather_pages

__all__ = ["Pool", "append_tokens", "copy_pages", "gather_pages"]
