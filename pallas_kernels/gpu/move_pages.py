"""Copies whole pages within GPU memory, in all layers: bulk copies through a ring in shared memory.

A page is cut into chunks, and the chunks of all copies and layers are shared out evenly over thread blocks that stay.
"""

from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hardware import KIB, GpuFacts

HOPPER = (9, 0)
BOX = 256  # the most elements along an axis of a bulk copy
CHUNK_BYTES = 16 * KIB
BUFFERS = 4  # of a thread block, so that two of them fit a multiprocessor with room to spare
THREAD_BLOCKS_PER_MULTIPROCESSOR = 2


def move_pages(
    source: Shaped[Array, "source_entries *page"] | None,
    target: Shaped[Array, "target_entries *page"] | jax.ShapeDtypeStruct,
    from_page: Int32[Array, " copies"],
    to_page: Int32[Array, " copies"],
    source_pages: int,
    target_pages: int,
    facts: GpuFacts,
    interpret: plgpu.InterpretGPUParams | None,
) -> Shaped[Array, "target_entries *page"]:
    """Copies page `from_page` of each layer of `source` to page `to_page` of the same layer of `target`.

    Args:
      source: page p of layer l is its entry l · source_pages + p; one layer, if it has as many entries, serves all.
        None for copies within the target.
      target: likewise, and its layers are those that are copied; in place if donated. Only a shape, for a new array,
        whose entries hold anything where nothing is copied to.
      from_page, to_page: a number out of range in either means no copy. No target stands twice or is a source.
      source_pages, target_pages: pages a layer.

    Cost: the copies there are; XLA lists them first, in O(copies).
    """
    check_gpu(facts)
    layers = target.shape[0] // target_pages
    chunks, rows, lanes = chunks_of(target)

    wanted = (from_page >= 0) & (from_page < source_pages) & (to_page >= 0) & (to_page < target_pages)
    (places,) = jnp.nonzero(wanted, size=wanted.shape[0], fill_value=0)
    pairs = jnp.stack([from_page[places], to_page[places]])
    count = jnp.sum(wanted, dtype=jnp.int32).reshape(1)

    def in_chunks(array: Array) -> Array:
        return array.reshape(array.shape[0] * chunks, rows, lanes)

    workers = facts.multiprocessors * THREAD_BLOCKS_PER_MULTIPROCESSOR

    def body(pairs, count, *refs):
        source, target, ring, arrived = (refs[0], *refs[-3:])
        layer_entries = source_pages if source.shape[0] > source_pages * chunks else 0
        worker = lax.axis_index("worker")
        steps = pl.cdiv(count[0] * (layers * chunks) - worker, workers)  # below 1 for workers without a chunk

        def ends(step):
            index = worker + step * workers
            copy, layer = lax.div(index, layers * chunks), lax.rem(lax.div(index, chunks), layers)
            chunk = lax.rem(index, chunks)
            entries = (pairs[0, copy] + layer * layer_entries, pairs[1, copy] + layer * target_pages)
            return tuple(entry * chunks + chunk for entry in entries)

        def send(step):
            @pl.when(step < steps)
            def start():
                buffer = lax.rem(step, BUFFERS)
                plgpu.copy_gmem_to_smem(source.at[ends(step)[0]], ring.at[buffer], arrived.at[buffer])

        def take(step, _):
            buffer = lax.rem(step, BUFFERS)
            plgpu.barrier_wait(arrived.at[buffer])
            plgpu.copy_smem_to_gmem(ring.at[buffer], target.at[ends(step)[1]])
            # All stores but the last have left their buffers: that of the step before is sent for again.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            send(step - 1 + BUFFERS)

        for step in range(BUFFERS - 1):
            send(jnp.int32(step))
        lax.fori_loop(0, steps, take, None)
        plgpu.wait_smem_to_gmem(0)

    shape = (target.shape[0] * chunks, rows, lanes)
    memory = [] if isinstance(target, jax.ShapeDtypeStruct) else [jax.new_ref(in_chunks(target))]
    arrays = [] if source is None else [in_chunks(source)]
    written = plgpu.kernel(
        body,
        out_type=() if memory else jax.ShapeDtypeStruct(shape, target.dtype),
        scratch_types=[
            plgpu.SMEM((BUFFERS, rows, lanes), target.dtype),
            plgpu.Barrier(num_barriers=BUFFERS),
        ],
        grid=(workers,),
        grid_names=("worker",),
        interpret=interpret,
    )(pairs, count, *arrays, *memory)
    return (jax.freeze(memory[0]) if memory else written).reshape(target.shape)


def chunks_of(target: Shaped[Array, "entries *page"] | jax.ShapeDtypeStruct) -> tuple[int, int, int]:
    """(chunks, rows, lanes): a page as so many equal chunks of at most CHUNK_BYTES, each a box that can be copied.

    ValueError if a page is no multiple of 16 bytes.
    """
    page = 1
    for dim in target.shape[1:]:
        page *= dim
    itemsize = jnp.dtype(target.dtype).itemsize
    lanes = gcd(page, BOX)
    if lanes * itemsize % 16:
        raise ValueError(
            f"pages {target.shape[1:]} of {target.dtype}; bulk copies take multiples of 16 bytes: pad them"
        )
    most = min(CHUNK_BYTES // (lanes * itemsize), BOX)
    rows = max(rows for rows in range(1, most + 1) if page // lanes % rows == 0)
    return page // lanes // rows, rows, lanes


def check_gpu(facts: GpuFacts) -> None:
    """NotImplementedError for a GPU other than a Hopper."""
    if facts.compute_capability != HOPPER:
        raise NotImplementedError(
            f"{facts.name} has {facts.compute_capability=}; this kernel is for Hopper {HOPPER}: use the XLA path"
        )
