"""Attention over a cache: `paged_attention` dispatches, `xla` runs anywhere, the kernels are in `pallas_kernels`."""

from kvjax.attention.checks import page_checks
from pallas_kernels.arguments import Scales

__all__ = ["Scales", "page_checks"]
