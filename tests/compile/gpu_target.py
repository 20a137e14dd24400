"""Compiles functions for NVIDIA GPUs that this machine does not have, by the compilers inside JAX's CUDA plugin.

Needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc (ptxas), nvidia-cuda-nvdisasm and nvidia-nvvm (libdevice) on
the import path (`make aot-gpu` installs them into .compilers/cuda), and a process of its own: libtpu and the CUDA
plugin do not share one. Import this module before any JAX backend is used.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.hardware import GPUS, GpuFacts

# The plugin otherwise looks for a driver, and for the CUDA libraries that only running needs.
jax.config.update("jax_platforms", "cpu")

# XLA's GpuTargetConfigProto. What does not come from the facts is common to all Hopper GPUs.
TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 clock_rate_ghz: 1.98
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  core_count: {facts.multiprocessors} l2_cache_size: {facts.l2_bytes}
  shared_memory_per_core: {facts.shared_memory_bytes}
  shared_memory_per_block_optin: {facts.shared_memory_bytes_per_block}
  device_memory_size: {facts.memory_bytes} memory_bandwidth: {facts.memory_bytes_per_second:.0f}
  cuda_compute_capability {{
    major: {facts.compute_capability[0]} minor: {facts.compute_capability[1]} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA" device_description_str: "{facts.device_kind}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 minor: 0 }}
"""


@dataclass(frozen=True)
class MosaicKernel:
    """A Mosaic GPU kernel as the assembler left it."""

    registers: int  # per thread
    spill_bytes: int  # stored plus loaded
    threads: int  # of a thread block
    shared_bytes: int  # scratch of a thread block, barriers left out
    ptx: str
    sass: str


def facts_of(target: str) -> GpuFacts:
    """The facts of a GPU of this harness. ValueError for another name."""
    if target not in GPUS:
        raise ValueError(f"{target=} is not a GPU this harness knows; use one of {', '.join(GPUS)}")
    return GPUS[target]


@cache
def device(target: str) -> jax.Device:
    """A compile-only device of the GPU named `target`, a key of GPUS.

    Raises ValueError for another name, ModuleNotFoundError without the compilers.
    """
    if find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError("jax_cuda13_plugin is not on the import path; use `make aot-gpu`")
    config = TARGET_CONFIG.format(facts=facts_of(target))
    return topologies.get_topology_desc(target, "cuda", target_config=config, topology="1x1x1").devices[0]


def compile_for(
    target: str, function: Callable, *shapes: Any, donate: tuple[int, ...] = (), options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles `function(*shapes)` for one GPU; nothing can be run, everything can be asked.

    Args:
      target: a key of GPUS.
      function: traced as `jax.jit` would; bind static arguments with functools.partial. It may be jitted already.
      shapes: pytrees of `jax.ShapeDtypeStruct` (arrays would pull the CPU backend in).
      donate: positions of the donated arguments.
      options: compiler options, as `jax.stages.Lowered.compile` takes them.

    Returns the compiled program: `memory_analysis()` tells aliased and temporary bytes, `as_text()` the optimised HLO.
    Raises jax.errors.JaxRuntimeError, or what Mosaic raises, where the compiler refuses.
    """
    gpu = device(target)
    sharding = SingleDeviceSharding(gpu)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    cores = facts_of(target).multiprocessors
    kind = AbstractDevice(device_kind=gpu.device_kind, num_cores=cores, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*placed)
        return traced.lower(lowering_platforms=("cuda",)).compile(options)


@contextmanager
def mosaic_kernels() -> Iterator[list[MosaicKernel]]:
    """The Mosaic kernels compiled inside the block, in a list that is filled when the block ends.

    Kernels that the process has compiled before come out of its cache and are not listed.
    """
    kernels: list[MosaicKernel] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            yield kernels
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        for log in sorted(Path(folder).glob("*.ptxas")):
            kernels.append(_read_kernel(log))


def _read_kernel(log: Path) -> MosaicKernel:
    text = log.read_text()
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    if not registers or not spills:
        raise ValueError(f"{log.name} tells no registers or no spills; the assembler wrote:\n{text}")
    ptx, sass, resources = (log.with_suffix(suffix).read_text() for suffix in (".ptx", ".sass_ctrl", ".resources.txt"))
    threads = math.prod(map(int, re.findall(r"\.maxntid (\d+), (\d+), (\d+)", ptx)[0]))
    shared_bytes = int(re.findall(r"smem_scratch_bytes=(\d+)", resources)[0])
    return MosaicKernel(max(map(int, registers)), sum(map(int, spills)), threads, shared_bytes, ptx, sass)
