"""Attention over a cache: `paged_attention` dispatches, `xla` runs anywhere, the kernels are in `pallas_kernels`."""

from kvjax.attention.checks import page_checks
from pallas_kernels.arguments import Scales
from pallas_kernels.tuned import load_tuned

__all__ = ["Scales", "load_tuned", "page_checks"]
