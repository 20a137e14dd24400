"""What every paged decode kernel asks of its arguments."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def check_decode_arguments(
    q: Float[Array, "queries q_heads key_dim"],
    pool: Float[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"],
    row: Int32[Array, "queries"],
    context: Int32[Array, "queries"],
    *,
    value_dim: int,
    lane_multiple: int,
) -> None:
    """Raises ValueError, saying what to change, unless shapes, dtypes and sizes are what the kernels take.

    `lane_multiple` is what the last axis of the pool is rounded up to on this backend.
    """
    if q.ndim != 3 or pool.ndim != 4 or pages.ndim != 2:
        raise ValueError(
            f"{q.shape=}, {pool.shape=}, {pages.shape=}; pass q [queries, q_heads, key_dim], "
            "pool [total_pages, kv_heads, page_size, lanes] and pages [rows, width]"
        )
    queries, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    if 0 in (*q.shape, *pool.shape, *pages.shape):
        raise ValueError(f"{q.shape=}, {pool.shape=}, {pages.shape=}; no dimension may be 0: do not call the kernel")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or pool.dtype != q.dtype:
        raise ValueError(f"{q.dtype=}, {pool.dtype=}; both must be bfloat16, or both float32: cast q")
    for name, array in (("pages", pages), ("row", row), ("context", context)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name}.dtype={array.dtype}; cast it to int32")
    if row.shape != (queries,) or context.shape != (queries,):
        raise ValueError(f"{row.shape=}, {context.shape=}; both must have one entry for each of {queries=}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} is not a multiple of {kv_heads=}; repeat KV heads or pad query heads")
    if key_dim not in (64, 128) or value_dim not in (64, 128):
        raise ValueError(f"{key_dim=}, {value_dim=}; heads of 64 or 128 are supported: pad them, or use the XLA path")
    expected = -(-(key_dim + value_dim) // lane_multiple) * lane_multiple
    if lanes != expected:
        raise ValueError(f"{lanes=} of the pool; {key_dim=} and {value_dim=} need {expected}: lay the pool out so")
    if page_size not in (16, 32, 64, 128):
        raise ValueError(f"{page_size=}; make pages of 16, 32, 64 or 128 tokens")
