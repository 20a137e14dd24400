"""Contiguous addresses for every sequence, with memory mapped behind them as it is needed (vAttention's method)."""

from kvjax.virtual.cache import VirtualCache
from kvjax.virtual.figures import Counters, Figures
from kvjax.virtual.host import AreaBudget, HostSubstrate
from kvjax.virtual.space import VirtualSpace
from kvjax.virtual.span import SpanLayout
from kvjax.virtual.substrate import AddressRange, Substrate

__all__ = [
    "AddressRange",
    "AreaBudget",
    "Counters",
    "Figures",
    "HostSubstrate",
    "SpanLayout",
    "Substrate",
    "VirtualCache",
    "VirtualSpace",
]
