"""What is to be planned: a model, its devices, and what it is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvjax.architecture import Architecture
from kvjax.capacity.formats import format_named
from kvjax.capacity.fragmentation import COPY_OVERHEAD_BYTES
from kvjax.capacity.ledger import ExecutableMemory, Weights
from kvjax.capacity.parallel import Parallelism


@dataclass(frozen=True, slots=True)
class Draft:
    """A smaller model that proposes tokens; it caches the same tokens as the large one."""

    architecture: Architecture
    weights: Weights


@dataclass(frozen=True)
class Deployment:
    """What is to be planned.

    Attributes:
      architecture: the model.
      weights: its weights.
      hbm: bytes of a device's memory.
      context: tokens a sequence may grow to.
      kv_format: a name of `formats.FORMATS`.
      parallel: devices along each axis.
      page_size: tokens a page; None takes the knee of a sweep.
      lengths: tokens of each sequence of a trace; empty plans for `context` alone.
      platform: "gpu", "tpu" or "cpu".
      chunk: packed tokens of the largest step.
      slack: share of the memory that the allocator cannot give out.
      draft: a draft model.
      staging: keep buffers for a remote tier.
      executable: of a compiled step, in place of predictions.
      scanned: the model runs its layers in a `lax.scan`.
      copy_overhead_bytes: see `fragmentation.COPY_OVERHEAD_BYTES`.

    Raises:
      ValueError: a size that is not positive, or an unknown format.
    """

    architecture: Architecture
    weights: Weights
    hbm: int
    context: int
    kv_format: str = "bf16"
    parallel: Parallelism = field(default_factory=Parallelism)
    page_size: int | None = None
    lengths: Sequence[int] = ()
    platform: str = "gpu"
    chunk: int = 8192
    slack: float = 0.05
    draft: Draft | None = None
    staging: bool = False
    executable: ExecutableMemory | None = None
    scanned: bool = False
    copy_overhead_bytes: int = COPY_OVERHEAD_BYTES

    def __post_init__(self) -> None:
        for name in ("hbm", "context", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.slack < 1:
            raise ValueError(f"slack={self.slack} must be at least 0 and below 1")
        format_named(self.kv_format)

    @property
    def typical(self) -> Sequence[int]:
        """Lengths to plan for: the trace, cut at the context, or the context alone."""
        return [min(length, self.context) for length in self.lengths] or [self.context]
