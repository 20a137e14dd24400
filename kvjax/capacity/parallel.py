"""What each kind of parallelism divides, and what it only copies."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvjax.architecture import CacheGroup
from kvjax.inputs import static_size


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Devices along each axis.

    Attributes:
      tensor: splits cached heads; latents, indexer keys and compressed entries are whole on every device, and a head is
        copied where there are fewer heads than devices.
      context: deals the pages of groups without a window out to devices; windows and states are whole on each.
      pipeline: splits the layers into equal runs.
      data: replicas; it multiplies sequences, and divides nothing on a device.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "pipeline", "data"):
            object.__setattr__(self, name, static_size(f"{name} parallelism", getattr(self, name)))

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    def heads(self, heads: int, what: str) -> int:
        """Heads on one device out of `heads`.

        Raises:
          ValueError: neither number divides the other, so that devices would hold different amounts.
        """
        if heads % self.tensor and self.tensor % heads:
            raise ValueError(
                f"tensor parallelism of {self.tensor} does not divide the {heads} heads of {what}, nor they it; "
                "choose a divisor or a multiple"
            )
        return max(1, heads // self.tensor)

    def share(self, heads: int) -> int:
        """Ways in which something of `heads` heads is really divided."""
        return min(heads, self.tensor) if heads % self.tensor == 0 or self.tensor % heads == 0 else 1

    def stage_layers(self, num_layers: int) -> int:
        """Layers of the longest pipeline stage."""
        return -(-num_layers // self.pipeline)

    def stages(self, groups: tuple[CacheGroup, ...], num_layers: int) -> list[tuple[CacheGroup, ...]]:
        """The groups of every pipeline stage, restricted to its layers.

        Raises:
          ValueError: there are fewer layers than stages.
        """
        if self.pipeline > num_layers:
            raise ValueError(f"pipeline parallelism of {self.pipeline} exceeds the model's {num_layers} layers")
        bounds = [stage * num_layers // self.pipeline for stage in range(self.pipeline + 1)]
        stages: list[tuple[CacheGroup, ...]] = [()] * self.pipeline
        for group in groups:
            mine: dict[int, list[int]] = {}
            for layer in group.layers:
                mine.setdefault(bisect_right(bounds, layer) - 1, []).append(layer)
            for stage, layers in mine.items():
                stages[stage] += (replace(group, layers=tuple(layers)),)
        return stages
