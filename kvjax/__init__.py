"""kvjax: the KV cache for JAX, on TPU and GPU.

Page tables and refcounts are immutable state, updated by jitted transitions; see `kvjax.cache` for the calls that model
code makes, `kvjax.pages` for ownership alone, and `kvjax.models` and `kvjax.engine` for consumers.
"""

from kvjax.allocation import init
from kvjax.cache import (
    KVCache,
    adopt,
    advance,
    after,
    attend,
    commit,
    compact,
    fork,
    pin,
    release,
    reorder,
    reserve,
    truncate,
    unpin,
    write,
)
from kvjax.contiguous import ContiguousCache, init_contiguous
from kvjax.grant import Grant
from kvjax.layout import physical_slot
from kvjax.pages import Fault, PageTableError, Status, check_invariants, raise_for_status
from kvjax.saving import describe, load, save
from kvjax.spec import CacheSpec, GroupSpec, TensorSpec

__all__ = [
    "CacheSpec",
    "ContiguousCache",
    "Fault",
    "Grant",
    "GroupSpec",
    "KVCache",
    "PageTableError",
    "Status",
    "TensorSpec",
    "adopt",
    "advance",
    "after",
    "attend",
    "check_invariants",
    "commit",
    "compact",
    "describe",
    "fork",
    "init",
    "init_contiguous",
    "load",
    "physical_slot",
    "pin",
    "raise_for_status",
    "release",
    "reorder",
    "reserve",
    "save",
    "truncate",
    "unpin",
    "write",
]
