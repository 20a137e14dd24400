"""Bytes of groups, tokens, pages and sequences, on one device.

For plain attention this is M_KV = 2 · L · B · T · H_kv · d_h · s, summed over what each group really keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from kvjax.architecture import CachedTensor, CacheGroup
from kvjax.capacity.formats import Format, format_named
from kvjax.capacity.parallel import Parallelism
from kvjax.layout import TPU_LANES, canonical_layout
from kvjax.spec import GroupSpec, TensorSpec

EXACT_BYTES = 2
"""Of an element kept in bfloat16 beside its codes."""


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The sizes of one group on one device.

    Attributes:
      group: the group, with the layers that this device holds.
      format: of its entries.
      parallel: how the devices share them.
      lane_multiple: rows are padded to it: 1, or 128 on TPU.
    """

    group: CacheGroup
    format: Format
    parallel: Parallelism = field(default_factory=Parallelism)
    lane_multiple: int = 1

    @property
    def entry_bytes(self) -> Fraction:
        """Bytes of one entry of one layer, without padding."""
        return sum((self._tensor_bytes(tensor) for tensor in self.group.tensors), Fraction(0))

    @property
    def padding(self) -> Fraction:
        """Padded over unpadded lanes of an entry; 1 without padding."""
        if self.lane_multiple == 1 or not self.group.tensors:
            return Fraction(1)
        # The ratio does not depend on the element, so one byte each stands for all formats.
        tensors = tuple(TensorSpec(t.name, self._heads(t), t.width, "int8") for t in self.group.tensors)
        spec = GroupSpec(self.group.name, (0,), tensors)
        padded, plain = (canonical_layout(spec, 1, lane_multiple=lanes) for lanes in (self.lane_multiple, 1))
        return Fraction(padded.bytes_per_page, plain.bytes_per_page)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that a further token adds over all layers, while it is kept: entries alone, without padding.

        Groups that a sequence holds whole from its start add nothing.
        """
        if not self.group.paged:
            return Fraction(0)
        return len(self.group.layers) * self.entry_bytes / self.group.tokens_per_entry

    @property
    def state_bytes(self) -> int:
        """Bytes a sequence holds whatever its length: states, and windows that are rings."""
        states = sum(-(-state.bytes // self.parallel.share(state.heads)) for state in self.group.states)
        ring = self.group.window or 0 if self.group.resident else 0
        return len(self.group.layers) * (states + math.ceil(ring * self.entry_bytes * self.padding))

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of the tokens that the format also keeps in bfloat16."""
        if not self.group.paged or self.group.tokens_per_entry > 1:
            return 0
        elements = sum(self._heads(t) * t.width for t in self.group.tensors if self._format_of(t) is self.format)
        return len(self.group.layers) * self.format.kept_exact(self.kept_tokens(tokens)) * elements * EXACT_BYTES

    def kept_tokens(self, tokens: int) -> int:
        """Tokens out of `tokens` whose entries are kept."""
        window = self.group.window
        if window is None:
            return tokens
        if self.group.chunked and tokens:
            return (tokens - 1) % window + 1
        return min(tokens, window)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page over all layers, padding included.

        Raises:
          ValueError: a page that does not hold a whole number of entries.
        """
        entries, left = divmod(page_size, self.group.tokens_per_entry)
        if left or not entries:
            raise ValueError(
                f"{page_size=} must be a multiple of {self.group.tokens_per_entry}, the tokens an entry of group "
                f"{self.group.name!r} stands for"
            )
        return len(self.group.layers) * math.ceil(entries * self.entry_bytes * self.padding)

    def pages(self, tokens: int, page_size: int) -> int:
        """The most pages a sequence holds on this device on its way to `tokens` tokens."""
        if not self.group.paged:
            return 0
        pages = -(-tokens // page_size)
        window = self.group.window
        if window is None:
            return -(-pages // self.parallel.context)
        # A window may begin and end inside pages; a chunk begins where a page does if it is a multiple of pages.
        aligned = self.group.chunked and window % page_size == 0
        return min(pages, window // page_size if aligned else (window + page_size - 2) // page_size + 1)

    def sequence_bytes(self, tokens: int, page_size: int) -> int:
        """The most bytes a sequence holds on this device on its way to `tokens` tokens."""
        pages = self.pages(tokens, page_size)
        paged = pages * self.page_bytes(page_size) if pages else 0
        return paged + self.state_bytes + self.exact_bytes(tokens)

    def _tensor_bytes(self, tensor: CachedTensor) -> Fraction:
        form = self._format_of(tensor)
        if form.name in tensor.packed:
            return Fraction(tensor.packed[form.name])
        heads = self._heads(tensor)
        return heads * form.row_bytes(tensor.width, heads=heads, values=tensor.name == "v")

    def _format_of(self, tensor: CachedTensor) -> Format:
        return self.format if tensor.format is None else format_named(tensor.format)

    def _heads(self, tensor: CachedTensor) -> int:
        if not tensor.sharded:
            return tensor.heads
        return self.parallel.heads(tensor.heads, f"{self.group.name}.{tensor.name}")


def lane_multiple(platform: str) -> int:
    """What rows are padded to on "cpu", "gpu" or "tpu"; ValueError for anything else."""
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"{platform=} is not known; known: cpu, gpu, tpu")
    return TPU_LANES if platform == "tpu" else 1


def group_sizes(
    groups: Iterable[CacheGroup],
    kv_format: str = "bf16",
    *,
    parallel: Parallelism | None = None,
    platform: str = "gpu",
) -> tuple[GroupSizes, ...]:
    """The sizes of several groups in one format; ValueError for an unknown format or platform."""
    form, lanes, shared = format_named(kv_format), lane_multiple(platform), parallel or Parallelism()
    return tuple(GroupSizes(group, form, shared, lanes) for group in groups)
