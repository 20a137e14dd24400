"""Loads the slots of a block from its buffer, and the scales of its tokens."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

LANES = 128

Ref = Any  # a Pallas reference


def product_dtype(query_dtype: jnp.dtype) -> jnp.dtype:
    """What products are made of. Every stored dtype but float32 and float16 is exact in bfloat16."""
    return jnp.dtype(jnp.bfloat16 if query_dtype == jnp.bfloat16 else jnp.float32)


def load_slots(
    block: Ref,  # VMEM [pages, kv_heads, page_size, lanes]
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
    of_pages = rows[:, column * LANES : (column + 1) * LANES]
    pages_per_column = LANES // page_size
    if pages_per_column == 1:
        return jnp.concatenate([of_pages[page : page + 1] for page in range(of_pages.shape[0])], axis=1)
    # Page p's scales turn to the lanes where its tokens stand among those of `pages_per_column` pages; then the rows of
    # these pages are laid over each other.
    turned = pltpu.roll(of_pages, (-lane) % LANES, 1, stride=page_size, stride_axis=0)
    row = lax.broadcasted_iota(jnp.int32, turned.shape, 0)
    place = lax.broadcasted_iota(jnp.int32, turned.shape, 1) >> (page_size.bit_length() - 1)
    columns = []
    for first in range(0, of_pages.shape[0], pages_per_column):
        own = jnp.where(row - first == place, turned, 0)
        columns.append(own.sum(axis=0, keepdims=True))
    return jnp.concatenate(columns, axis=1)
