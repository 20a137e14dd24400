"""Stores tokens through an address, into memory that XLA only reads (Mosaic GPU).

Memory mapped outside XLA's allocator cannot be donated, so no XLA op and no aliased kernel can write it in place.  The
address is a constant of the program here, and the stores a side effect that XLA does not see: what reads the memory has
to depend on the returned value, and that value has to be used.

Compiled for Hopper by the gates; the interpreters know no addresses, so it runs on a GPU or not at all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import Array, Int32, Shaped

THREADS = 128


def store_through(
    order: Int32[Array, ""],
    row: Int32[Array, " packed"],
    position: Int32[Array, " packed"],
    start: Int32[Array, ""],
    values: Shaped[Array, "packed elements"],
    *,
    address: int,
    rows: int,
    row_elements: int,
    token_elements: int,
) -> Int32[Array, ""]:
    """Stores values[i] at element row[i] · row_elements + position[i] · token_elements + start of the memory.

    Args:
      order: returned, so that one call follows on another.
      row: tokens whose row is not below `rows` are left out.
      position: the token's place in its row.
      start: first element of a token that is written.
      values: what to store; a multiple of 128 elements of 16 or 32 bits a token.
      address: where the memory begins; all addresses must be mapped that tokens not left out name.
      rows, row_elements, token_elements: its shape; the product with the element size may pass 2³².

    Returns `order`, once all is stored.

    Raises:
      NotImplementedError: elements that are no multiple of 128, or of another size.
    """
    packed, elements = values.shape
    size = values.dtype.itemsize
    if elements % THREADS or size not in (2, 4):
        raise NotImplementedError(
            f"values has {elements} elements of {values.dtype} a token; stores take a multiple of {THREADS} elements "
            "of 16 or 32 bits: use a paged cache for other shapes"
        )

    def body(order, row, position, start, values, done):
        token = lax.axis_index("token")

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 4)
        def store(_: Any, row: ir.Value, position: ir.Value, start: ir.Value, values: ir.Value) -> None:
            wide = ir.IntegerType.get_signless(64)

            def scalar(ref: ir.Value) -> ir.Value:
                return arith.extsi(wide, memref.load(ref, [mosaic.utils.c(0, ir.IndexType.get())]))

            def constant(value: int) -> ir.Value:
                return mosaic.utils.c(value, wide)

            of_row = scalar(row)
            element = arith.addi(
                arith.addi(
                    arith.muli(of_row, constant(row_elements)), arith.muli(scalar(position), constant(token_elements))
                ),
                scalar(start),
            )
            byte = arith.addi(arith.muli(element, constant(size)), constant(address))
            with mosaic.utils.when(arith.cmpi(arith.CmpIPredicate.slt, of_row, constant(rows))):
                kind = ir.MemRefType.get((elements,), ir.MemRefType(values.type).element_type)
                target = mosaic.utils.ptr_as_memref(llvm.inttoptr(ir.Type.parse("!llvm.ptr"), byte), kind)
                mosaic.FragmentedArray.load_strided(values).store_untiled(target)

        at = pl.ds(token, 1)
        store(row.at[at], position.at[at], start, values.at[token])

        @pl.when(token == 0)
        def _():
            done[0] = order[0]

    done = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.int32), grid=(packed,), grid_names=("token",))(
        order.reshape(1), row, position, start.reshape(1), values
    )
    return done[0]
