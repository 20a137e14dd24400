"""Copies whole pages within HBM, in all layers, several in flight.

The copy engine moves them and no vector unit sees them, whatever their dtype. On a chip with two cores each takes every
other layer.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.block_stream import Ref, Scalar
from pallas_kernels.tpu.dtypes import check_dtype

IN_FLIGHT = 32  # copies: 2 MiB of 8 heads × 16 tokens × 256 lanes in bfloat16, more than what hides their latency


def move_pages(
    source: Shaped[Array, "source_entries *page"] | None,
    target: Shaped[Array, "target_entries *page"] | jax.ShapeDtypeStruct,
    from_page: Int32[Array, " copies"],
    to_page: Int32[Array, " copies"],
    source_pages: int,
    target_pages: int,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams,
) -> Shaped[Array, "target_entries *page"]:
    """Copies page `from_page` of each layer of `source` to page `to_page` of the same layer of `target`.

    Args:
      source: page p of layer l is its entry l · source_pages + p; one layer, if it has as many entries, serves all.
        None for copies within the target.
      target: likewise, and its layers are those that are copied; in place if donated. Only a shape, for a new array,
        whose entries hold anything where nothing is copied to.
      from_page, to_page: a number out of range in either means no copy. No target stands twice or is a source.
      source_pages, target_pages: pages a layer.

    Cost: the copies there are, and a look at each pair of numbers.
    """
    check_dtype(target)
    layers = target.shape[0] // target_pages
    arrays = [] if source is None else [source]
    donated = [] if isinstance(target, jax.ShapeDtypeStruct) else [target]
    arrays += donated

    def kernel(from_page: Ref, to_page: Ref, *refs: Ref) -> None:
        *arrays, target, done = refs
        # Within the target, copies are read from the result, which is the same memory.
        source_ref = target if source is None else arrays[0]
        layer_entries = source_pages if source_ref.shape[0] > source_pages else 0
        core, cores = pl.program_id(0), facts.tensor_cores
        layers_here = lax.div(layers - core + cores - 1, cores)

        def copy(index: Scalar, layer: Scalar) -> Any:
            return pltpu.make_async_copy(
                source_ref.at[from_page[index] + layer * layer_entries],
                target.at[to_page[index] + layer * target_pages],
                done,
            )

        def visit(index, started):
            wanted = (
                (from_page[index] >= 0)
                & (from_page[index] < source_pages)
                & (to_page[index] >= 0)
                & (to_page[index] < target_pages)
            )

            def start(layer, started):
                @pl.when(started >= IN_FLIGHT)
                def wait():
                    _wait_for_one(target, done)

                copy(index, core + layer * cores).start()
                return started + 1

            return lax.fori_loop(0, jnp.where(wanted, layers_here, 0), start, started)

        started = lax.fori_loop(0, from_page.shape[0], visit, jnp.int32(0))
        lax.fori_loop(0, jnp.minimum(started, IN_FLIGHT), lambda *_: _wait_for_one(target, done), None)

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(target.shape, target.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(facts.tensor_cores,),
            in_specs=[in_hbm] * len(arrays),
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={1 + len(arrays): 0} if donated else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="move_pages",
    )(from_page, to_page, *arrays)


def _wait_for_one(target: Ref, done: Ref) -> None:
    pltpu.make_async_copy(target.at[0], target.at[0], done).wait()  # any will do: a wait only counts bytes
