"""What `reserve` gives back: who got how many positions, and the packed list of every granted token."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from kvjax.packing import pack_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Grant:
    """The positions that a `reserve` made writable.

    Attributes:
      tokens: granted tokens a row; 0 where refused or not asked.
      status: `kvjax.Status` of each row.
      context: tokens a row sees once these are written: committed length + granted.
      offset: where a row's tokens begin in the packed lists; they stand together, in order of position.
      row: the row of each packed token; `rows` (out of range) in padding.
      position: its position in the row; 0 in padding.
      copies: pages that were copied on write to make this grant, over all groups.
    """

    tokens: Int32[Array, " rows"]
    status: Int32[Array, " rows"]
    context: Int32[Array, " rows"]
    offset: Int32[Array, " rows"]
    row: Int32[Array, " packed"]
    position: Int32[Array, " packed"]
    copies: Int32[Array, ""]

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def packed(self) -> int:
        """Length of the packed lists: `max_tokens` of the reserve."""
        return self.row.shape[0]

    @property
    def visible(self) -> Int32[Array, " packed"]:
        """Positions each packed token attends to, itself included: position + 1; 0 in padding."""
        return jnp.where(self.row < self.rows, self.position + 1, 0)

    @property
    def last(self) -> Int32[Array, " rows"]:
        """Packed index of each row's last granted token; `packed` (out of range) for rows without one."""
        return jnp.where(self.tokens > 0, self.offset + self.tokens - 1, self.packed)


def make_grant(
    tokens: Int32[Array, " rows"],
    status: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    max_tokens: int,
    copies: Int32[Array, ""] | None = None,
) -> Grant:
    """Packs granted token counts (sum ≤ `max_tokens`) that follow the committed `length` of each row."""
    row, index = pack_rows(tokens, max_tokens)
    position = jnp.where(row < tokens.shape[0], length.at[row].get(mode="clip") + index, 0)
    return Grant(
        tokens=tokens,
        status=status,
        context=length + tokens,
        offset=jnp.cumsum(tokens) - tokens,
        row=row,
        position=position,
        copies=jnp.int32(0) if copies is None else copies,
    )
