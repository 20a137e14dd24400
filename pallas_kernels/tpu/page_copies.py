"""Copies of whole pages within HBM, in all layers, several in flight.

The copy engine moves them; no vector unit sees them, so that every dtype will do. One launch serves all layers, and on
a chip with two cores each takes every other one.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.page_stream import Ref, Scalar

IN_FLIGHT = 16  # copies: 128 KiB of 8 heads × 16 tokens × 256 lanes in bfloat16 is 2 MiB, more than latency asks for

Ends = Callable[[Scalar, Scalar], tuple[Ref, Ref]]
"""(item, layer) -> where a copy comes from and where it goes."""


def copy_each(
    lists: Sequence[Int32[Array, " items"]],
    memory: Sequence[Shaped[Array, "..."]],
    out: jax.ShapeDtypeStruct,
    plan: Callable[..., tuple[Callable[[Scalar], Scalar], Ends]],
    *,
    layers: int,
    aliased: int | None,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams,
    name: str,
) -> Shaped[Array, "..."]:
    """Makes the copies of `plan(*lists, *memory, out) -> (wanted, ends)`, all references: lists in SMEM, the rest in HBM.

    Args:
      lists: numbers of pages; they have one length, that of the items.
      memory: arrays that are copied from, or in place.
      out: the shape of the result.
      plan: `wanted(item)` says whether an item is copied at all, `ends(item, layer)` from where to where.
      layers: copies of each item.
      aliased: which of `memory` becomes the result, if donated; None for a result of its own.

    No copy's target is another's source or target. Cost: the copies there are, and a look at each item.
    """
    items = lists[0].shape[0]

    def kernel(*refs: Ref) -> None:
        *refs, done = refs
        wanted, ends = plan(*refs)
        _copy_layers(items, layers, facts.tensor_cores, wanted, ends, done)

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(facts.tensor_cores,),
            in_specs=[in_hbm] * len(memory),
            out_specs=in_hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={} if aliased is None else {len(lists) + aliased: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(*lists, *memory)


def in_range(page: Scalar, num_pages: int) -> Scalar:
    return (page >= 0) & (page < num_pages)


def _copy_layers(
    items: int, layers: int, cores: int, wanted: Callable[[Scalar], Scalar], ends: Ends, done: Ref
) -> None:
    """Starts this core's copies, never more than IN_FLIGHT at a time, and waits for all."""
    core = pl.program_id(0)
    layers_here = lax.div(layers - core + cores - 1, cores)

    def wait_for_one() -> None:
        pltpu.make_async_copy(*ends(0, 0), done).wait()  # any copy will do: a wait only counts bytes

    def copy(item, index, started):
        @pl.when(started >= IN_FLIGHT)
        def wait():
            wait_for_one()

        pltpu.make_async_copy(*ends(item, core + index * cores), done).start()
        return started + 1

    def visit(item, started):
        number = jnp.where(wanted(item), layers_here, 0)
        return lax.fori_loop(0, number, partial(copy, item), started)

    started = lax.fori_loop(0, items, visit, jnp.int32(0))
    lax.fori_loop(0, jnp.minimum(started, IN_FLIGHT), lambda *_: wait_for_one(), None)
