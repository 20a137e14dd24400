"""Where tensors stand: the pages of a running cache, the schema of any layout, the named ones, and addresses.

Plain Python and numpy; `kvjax.storage.convert` moves pools between layouts.
"""

from kvjax.layout.address import Address, SlotError, address, physical_slot, view
from kvjax.layout.known import CANONICAL_ORDER, LAYOUTS, layout_of, make_layout
from kvjax.layout.order import AXES, Factor
from kvjax.layout.page import TPU_LANES, PageLayout, PoolLayout, canonical_layout
from kvjax.layout.schema import ArrayLayout, Layout, Scales, Shard, TensorPlace

__all__ = [
    "AXES",
    "CANONICAL_ORDER",
    "LAYOUTS",
    "TPU_LANES",
    "Address",
    "ArrayLayout",
    "Factor",
    "Layout",
    "PageLayout",
    "PoolLayout",
    "Scales",
    "Shard",
    "SlotError",
    "TensorPlace",
    "address",
    "canonical_layout",
    "layout_of",
    "make_layout",
    "physical_slot",
    "view",
]
