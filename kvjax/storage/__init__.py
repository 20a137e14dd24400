"""Where the bytes are: pools, appends, page copies, gathers, images of pages, conversions.  No ownership here."""

from kvjax.storage.convert import Conversion, convert, plan_conversion
from kvjax.storage.dispatch import append_tokens, copy_pages
from kvjax.storage.images import Images, read_pages, write_pages
from kvjax.storage.pools import Pool, gather_pages
from kvjax.storage.scales import scales_by_name
from kvjax.storage.slots import physical_slots

__all__ = [
    "Conversion",
    "Images",
    "Pool",
    "append_tokens",
    "convert",
    "copy_pages",
    "gather_pages",
    "physical_slots",
    "plan_conversion",
    "read_pages",
    "scales_by_name",
    "write_pages",
]
