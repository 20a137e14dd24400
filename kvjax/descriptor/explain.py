"""Why two descriptors differ: each field by name, both values, and what the difference would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from kvjax.descriptor.schema import Descriptor


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two descriptors differ.

    Attributes:
      field: its path ("rope.theta", "spec.groups[0].tensors[1].dtype").
      first, second: its values.
      meaning: what would go wrong.
    """

    field: str
    first: Any
    second: Any
    meaning: str

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.first)} against {_short(self.second)} ({self.meaning})"


class DescriptorMismatch(ValueError):
    """Bytes of another cache: a typed miss.

    Attributes:
      differences: what differs, in the order of the fields; never empty.
    """

    def __init__(
        self,
        subject: str,
        differences: tuple[Difference, ...],
        repair: str = "Nothing was read; compute these tokens again",
    ) -> None:
        lines = "; ".join(map(str, differences))
        super().__init__(f"{subject} does not match in {lines}. {repair}")
        self.differences = differences


def explain(first: Descriptor, second: Descriptor) -> tuple[Difference, ...]:
    """Every field in which two descriptors differ, in order; empty if and only if they are equal."""
    return tuple(_differences("", "Descriptor", first, second))


def _differences(path: str, meaning: str, first: Any, second: Any) -> Iterator[Difference]:
    if type(first) is not type(second) or not (is_dataclass(first) or isinstance(first, tuple)):
        if type(first) is not type(second) or first != second:
            yield Difference(path, first, second, MEANINGS[meaning])
    elif isinstance(first, tuple):
        if len(first) != len(second):
            yield Difference(path, first, second, MEANINGS[meaning])
        else:
            for index, pair in enumerate(zip(first, second, strict=True)):
                yield from _differences(f"{path}[{index}]", meaning, *pair)
    else:
        for field in fields(first):
            within = f"{path}.{field.name}" if path else field.name
            pair = getattr(first, field.name), getattr(second, field.name)
            yield from _differences(within, f"{type(first).__name__}.{field.name}", *pair)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


MEANINGS = {
    "Descriptor.tokens": "the bytes hold other sequences",
    "Tokens.digest": "the entries belong to other token ids",
    "Tokens.computed": "another number of tokens is computed",
    "Descriptor.model": "another model computed the entries",
    "Model.name": "another model computed the entries",
    "Model.weights": "the weights changed since: entries are those of the old ones",
    "Descriptor.text": "ids came from text in another way",
    "Text.tokenizer": "another tokenizer: equal ids are other text",
    "Text.template": "another chat template: equal messages are other ids",
    "Descriptor.adapter": "one side computed with an adapter, the other without",
    "Adapter.name": "another adapter changed the keys and values",
    "Adapter.weights": "the adapter's weights changed since",
    "Descriptor.media": "the placeholder tokens stand for other inputs",
    "Media.digest": "the placeholder tokens stand for another input",
    "Media.position": "the input stands at other tokens",
    "Media.tokens": "the input takes another number of tokens",
    "Descriptor.rope": "one side has rotary positions, the other none",
    "Rope.kind": "keys are rotated by another rule",
    "Rope.theta": "keys are rotated at other frequencies",
    "Rope.dims": "another part of each key is rotated",
    "Rope.interleaved": "other pairs of elements are rotated together",
    "Rope.scaling": "keys are rotated at other frequencies",
    "Descriptor.positions": "keys carry other positions",
    "Positions.keys": "keys would be rotated twice, or never",
    "Positions.counted": "positions are counted differently",
    "Positions.first": "all positions are shifted",
    "Descriptor.spec": "other tensors are cached",
    "CacheSpec.groups": "layers are grouped differently",
    "GroupSpec.name": "the group is another",
    "GroupSpec.layers": "layers are stored in another order",
    "GroupSpec.tensors": "other tensors are cached",
    "GroupSpec.window": "another attention window: older tokens may be gone",
    "TensorSpec.name": "another tensor stands here",
    "TensorSpec.heads": "another number of cached heads",
    "TensorSpec.width": "another head dimension",
    "TensorSpec.dtype": "the same bits are other numbers",
    "Descriptor.pages": "pages are built differently",
    "PageLayout.page_size": "pages hold another number of tokens",
    "PageLayout.pools": "tensors are spread over other arrays",
    "PoolLayout.name": "the array is another",
    "PoolLayout.heads": "another number of heads in a page",
    "PoolLayout.lanes": "lanes are padded differently; the kernels of another device are meant",
    "PoolLayout.dtype": "the same bits are other numbers",
    "PoolLayout.slices": "K and V stand at other lanes",
    "Descriptor.shards": "the bytes are split over devices differently",
    "Shard.axis": "another axis is split over the devices",
    "Shard.mesh_axis": "the split runs over other devices",
    "Shard.count": "each device holds another share",
    "Descriptor.quantisation": "other tensors are quantised",
    "Quantisation.tensor": "another tensor is quantised",
    "Quantisation.codes": "codes mean other numbers",
    "Quantisation.axis": "scales belong to other values",
    "Quantisation.group": "scales belong to other values",
    "Quantisation.scale": "scales stand elsewhere",
    "Quantisation.scale_dtype": "the scales' bits are other numbers",
    "Quantisation.zero_point": "values are shifted on one side only",
    "Quantisation.update_time": "scales are set at another time: appending would mix two schemes",
    "Quantisation.residual": "another number of tokens is kept in full precision",
    "Quantisation.accumulator": "products are summed in another precision: tokens may differ",
    "Quantisation.constants": "codes were made with other fixed scales or tables",
    "Descriptor.tenant": "the bytes are somebody else's",
    "Descriptor.order": "the axes of every array run in another order",
    "Descriptor.byte_order": "the bytes of every element are turned round",
}
"""What a difference in each field means."""
