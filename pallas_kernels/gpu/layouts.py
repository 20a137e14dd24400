"""How the kernels' arrays lie in shared memory and over the registers of a warpgroup."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

# A matrix of 64 rows, or a multiple, as matrix instructions leave it: a row lies in four neighbouring threads.
MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def tiled(shape: tuple[int, ...], dtype: Any, lanes: int) -> Any:
    """Shared memory in swizzled tiles of 8 rows: what matrix instructions take, and free of bank conflicts.

    Tiles are 128 bytes wide, or the next power of two that divides `lanes` elements. Both operands of an instruction
    must agree in it, and so must a copy's destination with its source, whose rows are whole tiles.
    """
    size = jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32) if lanes * size % width == 0)
    tile = plgpu.TilingTransform((8, swizzle // size))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]


def lanes_at_once(dim: int, slot_lanes: int, quantised: bool) -> int:
    """The lanes of a row of `dim` that are taken together, and that tiles in shared memory must divide.

    They divide a slot, its key and value, too: a copy moves whole tiles. Of 8-bit codes no more are taken than fit in
    the registers, as numbers, beside everything else.
    """
    divisor = math.gcd(dim, slot_lanes)
    return math.gcd(divisor, 32) if quantised else divisor


def filled(value: float, shape: tuple[int, ...], layout: Any) -> Array:
    """A float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(per_row: Float[Array, " rows"], like: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Each row's number, in every column."""
    return lax.broadcast_in_dim(per_row, like.shape, (0,))


def along_columns(
    per_column: Float[Array, " columns"], like: Float[Array, "rows columns"]
) -> Float[Array, "rows columns"]:
    """Each column's number, in every row."""
    return lax.broadcast_in_dim(per_column, like.shape, (1,))


def lane_chunks(dim: int, most: int) -> list[pl.Slice]:
    """The lanes of a row in chunks of at most `most`, for what would not fit in the registers at once."""
    return [pl.ds(start, min(most, dim - start)) for start in range(0, dim, most)]
