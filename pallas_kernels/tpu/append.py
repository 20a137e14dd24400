"""Appends new keys and values to paged pools on TPU, in place, quantising on the way where the pool is quantised.

Memory on TPU is tiled: a copy cannot write one token of a head-major page, only an aligned strip of STRIP tokens of all
heads. So a strip is read, the new tokens are put into it and it is written back; its other slots keep every bit.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from pallas_kernels.bytes_arguments import check_append_arguments
from pallas_kernels.hardware import TpuFacts
from pallas_kernels.quantise import as_bits, stored_tokens
from pallas_kernels.tpu.block_stream import Ref, Scalar
from pallas_kernels.tpu.dtypes import check_dtype
from pallas_kernels.tpu.rewrite import Unit, rewrite

STRIP = 8  # tokens: the rows of a tile, whatever the dtype
LANES = 128


def append(
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: tuple[Float[Array, "packed kv_heads _"], ...],
    *,
    scales: tuple[Float32[Array, "*_"], ...] | None = None,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Shaped[Array, "total_pages kv_heads page_size lanes"], tuple[Float32[Array, "*_"], ...] | None]:
    """Writes one token each into slot `offset` of page `page`; `bytes_reference.append` states the contract.

    Args:
      pool: as there but for float16, lanes rounded up to a multiple of 128; so are those of scales a token.
      page, offset: as there. Tokens of one strip of a page, STRIP slots from a multiple of it on, must be neighbours in
        the list: as they are where a row's tokens stand together, in order of position.
      tensors, scales: as there.
      facts: the chip that the kernel is compiled for.
      interpret: as in `pl.pallas_call`.

    Cost: each strip touched is read and written, all heads of it; one that is wholly new is not read. Scales a token
    are rewritten a page at a time. Two cores share the tokens.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for float16.
    """
    check_dtype(pool)
    check_append_arguments(pool, page, offset, tensors, scales=scales, lane_multiple=LANES)
    tokens, made = stored_tokens(tensors, scales, pool)
    page_size = pool.shape[2]
    call = partial(rewrite, facts=facts, interpret=interpret)
    pool = call(pool, page_size, page, offset, _words(tokens), strip_of(pool), name="append")
    if made is not None and scales is not None:
        unit, pairs = scale_row_of(scales[0], pool), zip(scales, made, strict=True)
        rewritten = [
            call(old, page_size, page, offset, _rows(new, pool, old), unit, name="append_scales") for old, new in pairs
        ]
        scales = tuple(rewritten)
    return pool, scales


def strip_of(pool: Shaped[Array, "total_pages kv_heads page_size lanes"]) -> Unit:
    """A strip of tokens of all heads, seen as 32-bit words, each of one lane and `packing` tokens."""
    _, kv_heads, _, lanes = pool.shape
    bits = 8 * pool.dtype.itemsize
    packing = 32 // bits

    def place(array: Ref, page: Scalar, slot: Scalar) -> Ref:
        return array.at[page, :, pl.ds(slot, STRIP), :]

    def merge(strip: Ref, token: Ref, slot: Scalar) -> None:
        old = pltpu.bitcast(strip[...], jnp.uint32)
        mask = lax.shift_left(jnp.uint32(2**bits - 1), ((slot & (packing - 1)) * bits).astype(jnp.uint32))
        row = lax.broadcasted_iota(jnp.int32, old.shape, 1)
        new = (old & ~mask) | (token[...] & mask)
        strip[...] = pltpu.bitcast(
            jnp.where(row == lax.shift_right_logical(slot, packing.bit_length() - 1), new, old), strip.dtype
        )

    return Unit(STRIP, True, (kv_heads, STRIP, lanes), place, merge)


def scale_row_of(scales: Float32[Array, "total_pages scale_lanes"], pool: Array) -> Unit:
    """The scales of a page: head h and slot t at lane h · page_size + t."""
    _, kv_heads, page_size, _ = pool.shape

    def place(array: Ref, page: Scalar, slot: Scalar) -> Ref:
        return array.at[pl.ds(page, 1)]

    def merge(row: Ref, token: Ref, slot: Scalar) -> None:
        lane = lax.broadcasted_iota(jnp.int32, row.shape, 1)
        taken = (lane & (page_size - 1) == slot) & (lane < kv_heads * page_size)
        row[...] = jnp.where(taken, token[...], row[...])

    filled = scales.shape[1] == kv_heads * page_size
    return Unit(page_size, filled, (1, scales.shape[1]), place, merge)


def _words(tokens: Shaped[Array, "packed kv_heads lanes"]) -> UInt32[Array, "packed kv_heads 1 lanes"]:
    """Each element's bits, as often as they fit into a word: wherever its slot is in a word, there they are."""
    bits = 8 * tokens.dtype.itemsize
    copies = sum(1 << shift for shift in range(0, 32, bits))
    return (as_bits(tokens).astype(jnp.uint32) * jnp.uint32(copies))[:, :, None]


def _rows(
    made: Float32[Array, "packed kv_heads"], pool: Array, scales: Float32[Array, "total_pages scale_lanes"]
) -> Float32[Array, "packed 1 scale_lanes"]:
    """The scales of each token at all lanes of their heads, whatever its slot. Lanes beyond are never taken."""
    rows = jnp.repeat(made, pool.shape[2], axis=1)
    return jnp.pad(rows, ((0, 0), (0, scales.shape[1] - rows.shape[1])))[:, None]
