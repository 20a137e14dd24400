"""What a kernel may need to know about the chip it runs on.

Kernels never ask the runtime which device they run on: the caller passes one of these values, so that a kernel can be
traced, interpreted and compiled on a machine that has no such chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallas_kernels.tuned import Tuned

KIB = 2**10
MIB = 2**20


@dataclass(frozen=True, slots=True)
class TpuFacts:
    """One TPU TensorCore, and how many of them one JAX device drives. Memory figures are per TensorCore."""

    name: str
    device_kind: str  # what `jax.Device.device_kind` says
    tensor_cores: int  # per JAX device: 2 on the megacore chips
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes_per_second: float
    tuned: tuple[Tuned, ...] = ()  # block sizes measured on it, see `pallas_kernels.tuned`


# Vector memory, scalar memory and memory bandwidth as JAX states them in `jax.experimental.pallas.tpu.get_tpu_info`.
TPU_V4 = TpuFacts("v4", "TPU v4", 2, 16 * MIB, MIB, 0.615e12)
TPU_V5E = TpuFacts("v5e", "TPU v5 lite", 1, 128 * MIB, MIB, 0.820e12)
TPU_V5P = TpuFacts("v5p", "TPU v5", 2, 64 * MIB, MIB, 1.230e12)
TPU_V6E = TpuFacts("v6e", "TPU v6 lite", 1, 128 * MIB, MIB, 1.640e12)
TPU_7X = TpuFacts("tpu7x", "TPU7x", 1, 64 * MIB, MIB, 3.700e12)

TPUS = {facts.name: facts for facts in (TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, TPU_7X)}


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU. Shared memory figures are those of one streaming multiprocessor."""

    name: str
    device_kind: str  # what `jax.Device.device_kind` says
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_bytes: int
    shared_memory_bytes_per_block: int  # the most that one thread block may ask for
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_second: float
    tuned: tuple[Tuned, ...] = ()  # block sizes measured on it, see `pallas_kernels.tuned`


# From NVIDIA's H100 and H200 data sheets (SXM boards) and the Hopper tuning guide; memory as the driver reports it.
H100 = GpuFacts("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 228 * KIB, 227 * KIB, 50 * MIB, 84942979072, 3.352e12)
H200 = GpuFacts("h200", "NVIDIA H200", (9, 0), 132, 228 * KIB, 227 * KIB, 50 * MIB, 151397597184, 4.800e12)

GPUS = {facts.name: facts for facts in (H100, H200)}
