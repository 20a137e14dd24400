"""Attention over a cache: `paged_attention` dispatches, `xla` runs anywhere, the kernels are in `pallas_kernels`."""

from pallas_kernels.arguments import Scales

__all__ = ["Scales"]
