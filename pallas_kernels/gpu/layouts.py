"""How the kernels' arrays lie in shared memory and over the registers of a warpgroup."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

# A matrix of 64 rows, or a multiple, as matrix instructions leave it: a row lies in four neighbouring threads.
MATRIX = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)

SWIZZLE_BYTES = 128


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in swizzled tiles of 8 rows of 128 bytes: what matrix instructions take, free of bank conflicts."""
    tile = plgpu.TilingTransform((8, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    swizzle = plgpu.SwizzleTransform(SWIZZLE_BYTES)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tile, swizzle))


def filled(value: float, shape: tuple[int, ...], layout: Any) -> Array:
    """A float32 array of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def along_rows(per_row: Float[Array, " rows"], like: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Each row's number, in every column."""
    return lax.broadcast_in_dim(per_row, like.shape, (0,))
