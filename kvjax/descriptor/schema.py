"""What must be equal before one cache may read another's bytes.

Equal shapes never make two caches compatible: the same array means something else under another weight version, another
rotary base or another order of heads and tokens.  Digests are SHA-256 in hexadecimal (`token_digest`, `weights_digest`,
`text_digest`); what a part does not have is None or an empty tuple, never left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvjax.descriptor.encoding import EncodingError, decode, encode
from kvjax.descriptor.typed import Typed
from kvjax.layout import CANONICAL_ORDER, PageLayout, PoolLayout, Shard
from kvjax.spec import CacheSpec, GroupSpec, TensorSpec

DESCRIPTOR_VERSION = 1
"""Changes with any change of what is serialised: other versions are refused."""


@dataclass(frozen=True, slots=True)
class Tokens(Typed):
    """The tokens of one sequence whose entries the bytes hold.

    Attributes:
      digest: of their ids, in order.
      computed: how many are computed.
    """

    digest: str
    computed: int


@dataclass(frozen=True, slots=True)
class Model(Typed):
    """The model that computed the entries.

    Attributes:
      name: of the architecture and size.
      weights: digest of the weights; an update of them is another version.
    """

    name: str
    weights: str


@dataclass(frozen=True, slots=True)
class Text(Typed):
    """How text became ids.

    Attributes:
      tokenizer: digest of the tokenizer's files.
      template: digest of the chat template, if one was used.
    """

    tokenizer: str
    template: str | None


@dataclass(frozen=True, slots=True)
class Adapter(Typed):
    """A LoRA or other adapter on the model.

    Attributes:
      name: as served.
      weights: digest of its weights: one name may be loaded twice.
    """

    name: str
    weights: str


@dataclass(frozen=True, slots=True)
class Media(Typed):
    """An image, sound or other input behind placeholder tokens, which are alike for all of them.

    Attributes:
      digest: of its content.
      position: of its first placeholder.
      tokens: placeholders it takes.
    """

    digest: str
    position: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rope(Typed):
    """The rotary embedding of the cached keys.

    Attributes:
      kind: "default", "linear", "llama3", "yarn", …
      theta: base of the frequencies.
      dims: elements of a head that are rotated.
      interleaved: pairs are neighbours; otherwise halves.
      scaling: the parameters of `kind`, by name, sorted.
    """

    kind: str
    theta: float
    dims: int
    interleaved: bool
    scaling: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        Typed.__post_init__(self)
        names = [name for name, _ in self.scaling]
        if names != sorted(set(names)):
            raise ValueError(f"Rope.scaling={self.scaling} must be sorted and name each parameter once")


@dataclass(frozen=True, slots=True)
class Positions(Typed):
    """What positions the cached keys carry.

    Attributes:
      keys: "rotated" before they were cached, "unrotated" (the reader rotates), or "none" (no positions).
      counted: "original": by the token's place in the text; "in_cache": by its place among those kept.
      first: position of the first token.
    """

    keys: Literal["rotated", "unrotated", "none"]
    counted: Literal["original", "in_cache"] = "original"
    first: int = 0


@dataclass(frozen=True, slots=True)
class Quantisation(Typed):
    """How one tensor is quantised.

    Attributes:
      tensor: its name.
      codes: what a code is: "int2", "int4", "float8_e4m3fn", "nuq3", …
      axis: along which values share a scale: "lane", "token" or "tensor" (one scale for all).
      group: values that share it; 0 for "tensor".
      scale: name of the tensor that holds the scales; None if they are constants, see `constants`.
      scale_dtype: dtype of scales and zero points.
      zero_point: there is one beside each scale.
      update_time: when scales are set: "write", "group_full", "residual_full" or "calibration".
      residual: newest tokens kept in full precision.
      accumulator: dtype in which products with dequantised values are summed.
      constants: digest of scales, tables or thresholds that are fixed beforehand.
    """

    tensor: str
    codes: str
    axis: Literal["lane", "token", "tensor"]
    group: int
    scale: str | None
    scale_dtype: str
    zero_point: bool
    update_time: Literal["write", "group_full", "residual_full", "calibration"]
    residual: int
    accumulator: str
    constants: str | None


@dataclass(frozen=True)
class Descriptor(Typed):
    """All that must match before bytes are read.

    Attributes:
      tokens: the sequences the bytes hold, one for each row that is not empty, in order.
      model: who computed them.
      text: how text became ids; None where ids came without.
      adapter: on the model; None without.
      media: inputs behind placeholder tokens.
      rope: rotary embedding; None without.
      positions: what positions keys carry.
      spec: layers, groups, windows, tensors, heads, widths, dtypes.
      pages: page size, lanes and padding of each group.
      order: of the axes of every array (`kvjax.layout.schema`).
      shards: the axes split over a mesh.
      byte_order: of every element.
      quantisation: of each tensor that is quantised.
      tenant: whose bytes these are; a prefix is never shared across tenants.
    """

    tokens: tuple[Tokens, ...]
    model: Model
    text: Text | None
    adapter: Adapter | None
    media: tuple[Media, ...]
    rope: Rope | None
    positions: Positions
    spec: CacheSpec
    pages: tuple[PageLayout, ...]
    shards: tuple[Shard, ...]
    quantisation: tuple[Quantisation, ...]
    tenant: str
    order: str = CANONICAL_ORDER
    byte_order: Literal["little", "big"] = "little"

    def to_bytes(self) -> bytes:
        """The canonical serialisation; equal descriptors and no others have equal bytes."""
        return encode(("kvjax.Descriptor", DESCRIPTOR_VERSION, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Descriptor:
        """The inverse of `to_bytes`; DescriptorError for anything else, or another version."""
        try:
            match decode(data, RECORDS):
                case ("kvjax.Descriptor", int(version), Descriptor() as found) if version == DESCRIPTOR_VERSION:
                    return found
        except EncodingError as error:
            raise DescriptorError(f"no descriptor of version {DESCRIPTOR_VERSION}: {error}") from error
        raise DescriptorError(f"no descriptor of version {DESCRIPTOR_VERSION}")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the serialisation, in hexadecimal: 256 bits that stand for the whole."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


class DescriptorError(ValueError):
    """Bytes that are no descriptor of this version."""


RECORDS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Descriptor,
        Tokens,
        Model,
        Text,
        Adapter,
        Media,
        Rope,
        Positions,
        Quantisation,
        CacheSpec,
        GroupSpec,
        TensorSpec,
        PageLayout,
        PoolLayout,
        Shard,
    )
}
"""Every dataclass that may occur in a descriptor, by name."""
