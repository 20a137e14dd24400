"""Keys and values in spans: a row's tokens one after another in memory, so that one copy brings a block of them."""

import math
from dataclasses import dataclass, field

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.arguments import Attention
from pallas_kernels.gpu.ring import Ref, Ring, Scalar
from pallas_kernels.gpu.schedule import BLOCK

RECORD_BYTES = 128
"""A token's record is a multiple of it, and so is the place where a group of layers begins: copies move such tiles."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Spans:
    """A span of tokens a row: arrays, or in a kernel references to them.

    Attributes:
      memory: all rows; a token's record holds `lanes` for each KV head of this layer from element `start` on.
      start: see there.
      lanes: a KV head's key, then its value.
    """

    memory: Ref  # [rows, span_tokens, record]
    start: Ref  # Int32[1]
    lanes: int = field(metadata={"static": True})

    # There are no scales for every token.
    key_scales = None
    value_scales = None
    copies = 1

    @property
    def rows(self) -> int:
        return self.memory.shape[0]

    def stream(
        self, attention: Attention, row: Scalar, kv_head: Scalar, queries: Scalar, context: Scalar
    ) -> "SpanStream":
        """Where the blocks of an item come from."""
        return SpanStream(self, row, self.start[0] + kv_head * self.lanes)


@dataclass(frozen=True)
class SpanStream:
    """The blocks of one item: a row and KV head."""

    source: Spans  # of references
    row: Scalar
    first_lane: Scalar

    def places(self, block: Scalar) -> list[Scalar]:
        """Nothing has to be looked up."""
        return []

    def send_keys(self, ring: Ring, turn: Scalar, block: Scalar, places: list[Scalar]) -> None:
        """Starts the copy of a block's keys, once the ring has room."""
        self._send(ring, turn, block, self.first_lane)

    def send_values(self, ring: Ring, turn: Scalar, block: Scalar, places: list[Scalar], key_dim: int) -> None:
        """Starts the copy of a block's values, which follow `key_dim` lanes of keys, once the ring has room."""
        self._send(ring, turn, block, self.first_lane + key_dim)

    def _send(self, ring: Ring, turn: Scalar, block: Scalar, first_lane: Scalar) -> None:
        buffer = ring.await_room(turn)
        # Whole tiles: they divide keys, values and heads, and 128 bytes, which the group's place is a multiple of.
        tile = math.gcd(ring.lanes, RECORD_BYTES // ring.slots.dtype.itemsize)
        tokens, lanes = pl.ds(block * BLOCK, BLOCK), pl.ds(pl.multiple_of(first_lane, tile), ring.slots.shape[2])
        plgpu.copy_gmem_to_smem(
            self.source.memory.at[self.row, tokens, lanes], ring.slots.at[buffer], ring.arrived.at[buffer]
        )
