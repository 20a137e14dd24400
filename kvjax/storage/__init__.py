"""Where the bytes are: pools, appends, page copies, gathers.  No ownership here."""

from kvjax.storage.images import Images, read_pages, write_pages
from kvjax.storage.pools import Pool, append_tokens, copy_pages, gather_pages

__all__ = ["Images", "Pool", "append_tokens", "copy_pages", "gather_pages", "read_pages", "write_pages"]
