"""How many tokens fit: bytes from an architecture, the memory ledger, fragmentation, plans and advice."""

from kvjax.capacity.advice import Advice, Workload, advise
from kvjax.capacity.allocated import CacheBytes, cache_bytes
from kvjax.capacity.deployment import Deployment, Draft
from kvjax.capacity.formats import FORMATS, WEIGHT_BITS, Format, weight_bytes
from kvjax.capacity.fragmentation import (
    PageCost,
    expected_waste,
    knee,
    measured_waste,
    sweep,
    utilisation,
    worst_waste,
)
from kvjax.capacity.ledger import ExecutableMemory, Ledger, Line, Step, Weights
from kvjax.capacity.parallel import Parallelism
from kvjax.capacity.plan import GroupPlan, Plan, make_plan
from kvjax.capacity.sizes import GroupSizes, group_sizes

__all__ = [
    "FORMATS",
    "WEIGHT_BITS",
    "Advice",
    "CacheBytes",
    "Deployment",
    "Draft",
    "ExecutableMemory",
    "Format",
    "GroupPlan",
    "GroupSizes",
    "Ledger",
    "Line",
    "PageCost",
    "Parallelism",
    "Plan",
    "Step",
    "Weights",
    "Workload",
    "advise",
    "cache_bytes",
    "expected_waste",
    "group_sizes",
    "knee",
    "make_plan",
    "measured_waste",
    "sweep",
    "utilisation",
    "weight_bytes",
    "worst_waste",
]
