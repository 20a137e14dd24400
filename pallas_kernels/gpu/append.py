"""Appends new keys and values to paged pools on Hopper GPUs, in place, quantising on the way.

One thread block a token: bulk copies bring its lanes of all heads into shared memory and put them into the slot. They
move bits, whatever the dtype; no other slot is read or written.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.bytes_arguments import check_append_arguments
from pallas_kernels.gpu.move_pages import BOX, check_gpu
from pallas_kernels.hardware import GpuFacts
from pallas_kernels.quantise import stored_tokens

ALIGNMENT = 16  # bytes: bulk copies begin and end at multiples of it


def append(
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: tuple[Float[Array, "packed kv_heads _"], ...],
    *,
    scales: tuple[Float32[Array, "*_"], ...] | None = None,
    facts: GpuFacts,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Shaped[Array, "total_pages kv_heads page_size lanes"], tuple[Float32[Array, "*_"], ...] | None]:
    """Writes one token each into slot `offset` of page `page`; `bytes_reference.append` states the contract.

    Args:
      pool, page, offset, tensors, scales: as there; no lanes are padded. At most 256 heads.
      facts: the GPU that the kernel is compiled for.
      interpret: as in `plgpu.kernel`.

    Cost: reads and writes the new tokens, once each in XLA, which casts them, and once in the kernel.

    Raises ValueError for shapes, dtypes and sizes that the kernel does not take, NotImplementedError for other GPUs.
    """
    check_gpu(facts)
    check_append_arguments(pool, page, offset, tensors, scales=scales, lane_multiple=1)
    total_pages, kv_heads, page_size, lanes = pool.shape
    if kv_heads > BOX or lanes * pool.dtype.itemsize % ALIGNMENT:
        raise ValueError(
            f"{kv_heads=}, {lanes=} of {pool.dtype}; at most {BOX} heads and whole {ALIGNMENT} bytes of lanes can be "
            "copied at once: pad the lanes, or shard the heads"
        )
    tokens, made = stored_tokens(tensors, scales, pool)
    widths = [min(BOX, lanes - start) for start in range(0, lanes, BOX)]
    columns = [pl.ds(index * BOX, width) for index, width in enumerate(widths)]
    slots = [jax.new_ref(array) for array in (pool, *((scales or ()) if made else ()))]

    def body(page, offset, tokens, *refs):
        made, (pool, *scales), (buffers, arrived) = refs[: len(slots) - 1], refs[len(slots) - 1 : -2], refs[-2:]
        token = lax.axis_index("token")
        target, slot = page[token], offset[token]

        @pl.when((target >= 0) & (target < total_pages) & (slot >= 0) & (slot < page_size))
        def write():
            for column, buffer in zip(columns, buffers, strict=True):
                plgpu.copy_gmem_to_smem(tokens.at[token, :, column], buffer, arrived)
            plgpu.barrier_wait(arrived)
            for column, buffer in zip(columns, buffers, strict=True):
                plgpu.copy_smem_to_gmem(buffer, pool.at[target, :, slot, column])

            for new, old in zip(made, scales, strict=True):

                def write_scale(head, _, new=new, old=old):
                    old[target, head * page_size + slot] = new[token, head]

                lax.fori_loop(0, kv_heads, write_scale, None)
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            [plgpu.SMEM((kv_heads, width), pool.dtype) for width in widths],
            plgpu.Barrier(num_arrivals=len(columns)),
        ],
        grid=(page.shape[0],),
        grid_names=("token",),
        interpret=interpret,
    )(page, offset, tokens, *(made or ()), *slots)
    pool, *written = (jax.freeze(slot) for slot in slots)
    return pool, tuple(written) if made else scales
