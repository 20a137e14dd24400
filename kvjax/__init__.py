"""kvjax: the KV cache for JAX, on TPU and GPU."""

from kvjax.cache import attend, commit, release, reserve, write
from kvjax.contiguous import ContiguousCache, init_contiguous
from kvjax.grant import Grant
from kvjax.pages import PageTableError, Status, raise_for_status
from kvjax.spec import CacheSpec, GroupSpec, TensorSpec

__all__ = [
    "CacheSpec",
    "ContiguousCache",
    "Grant",
    "GroupSpec",
    "PageTableError",
    "Status",
    "TensorSpec",
    "attend",
    "commit",
    "init_contiguous",
    "raise_for_status",
    "release",
    "reserve",
    "write",
]
