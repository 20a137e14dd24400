"""Loads the slots of a block from its buffer, and the scales of its tokens."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

LANES = 128

Ref = Any  # a Pallas reference


def product_dtype(query_dtype: jnp.dtype) -> jnp.dtype:
    """What products are made of. Quantised numbers are exact in either."""
    return jnp.dtype(jnp.bfloat16 if query_dtype == jnp.bfloat16 else jnp.float32)


def load_slots(
    block: Ref,  # VMEM [pages, kv_heads, tiles, rows, lanes], see `block_stream.in_tiles`
    head: int,
    dtype: jnp.dtype,
) -> Float[Array, "tokens lanes"]:
    """The slots of one head, token after token, as `dtype`."""
    stored = block[:, head]
    if stored.dtype != dtype:
        stored = stored.astype(jnp.float32).astype(dtype)
    return stored.reshape(-1, stored.shape[-1])


def load_token_scales(
    rows: Ref,  # VMEM Float32[pages, scale_lanes]
    head: int,
    page_size: int,
) -> Float32[Array, "1 tokens"]:
    """The scales of one head, token after token, from rows of pages where they begin at lane head · page_size."""
    column, lane = divmod(head * page_size, LANES)
    lanes = slice(column * LANES, (column + 1) * LANES)
    pages_per_column = LANES // page_size
    columns = []
    for first in range(0, rows.shape[0], pages_per_column):
        of_pages = rows[first : first + pages_per_column, lanes]
        if pages_per_column > 1:
            # Each page's scales turn to the lanes where its tokens stand among those of these pages; then the rows are
            # laid over each other. Heads share most of the turns.
            row = lax.broadcasted_iota(jnp.int32, of_pages.shape, 0)
            place = lax.broadcasted_iota(jnp.int32, of_pages.shape, 1) >> (page_size.bit_length() - 1)
            own = jnp.zeros_like(of_pages)
            for page in range(pages_per_column):
                turned = pltpu.roll(of_pages, (page * page_size - lane) % LANES, 1)
                own = jnp.where((row == page) & (place == page), turned, own)
            of_pages = own.sum(axis=0, keepdims=True)
        columns.append(of_pages)
    return jnp.concatenate(columns, axis=1)
