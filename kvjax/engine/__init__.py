"""Continuous batching over any model that follows `kvjax.models.protocol`."""

from kvjax.engine.backing import Backing, ContiguousBacking, PagedBacking
from kvjax.engine.beams import BeamOptions, BeamReport, BeamResult, BeamSearch, Hypothesis
from kvjax.engine.engine import Engine
from kvjax.engine.extents import ExtentBacking
from kvjax.engine.metrics import Distribution, Metrics, finite
from kvjax.engine.pagemap import PageMap
from kvjax.engine.request import Event, FinishReason, Request, Result
from kvjax.engine.speculation import Drafter, DraftModel, NoDrafts, PromptLookup
from kvjax.engine.virtual import VirtualBacking

__all__ = [
    "Backing",
    "BeamOptions",
    "BeamReport",
    "BeamResult",
    "BeamSearch",
    "ContiguousBacking",
    "Distribution",
    "DraftModel",
    "Drafter",
    "Engine",
    "Event",
    "ExtentBacking",
    "FinishReason",
    "Hypothesis",
    "Metrics",
    "NoDrafts",
    "PageMap",
    "PagedBacking",
    "PromptLookup",
    "Request",
    "Result",
    "VirtualBacking",
    "finite",
]
