"""Compiles functions for TPUs that this machine does not have, by the compiler inside libtpu.

Needs libtpu on the import path (`pip install --target DIR --no-deps libtpu==…`, the version that jax's `tpu` extra
names), and a process of its own: libtpu and the CUDA plugin do not share one. Import this module before any JAX backend
is used.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

# libtpu otherwise asks the cloud's metadata server which machine this is, and complains when there is none.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Only compiling: no chip is held, so two of these may run side by side.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

jax.config.update("jax_platforms", "cpu")  # or JAX would look for a TPU here, now that it finds libtpu

# The smallest topology of each chip that libtpu describes.
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@cache
def device(target: str) -> jax.Device:
    """A compile-only device of the chip named `target`, a key of TOPOLOGIES. ValueError for another name."""
    if target not in TOPOLOGIES:
        raise ValueError(f"{target=} is not a TPU this harness knows; use one of {', '.join(TOPOLOGIES)}")
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices[0]


def abstract_mesh(target: str) -> AbstractMesh:
    """What tells a trace that it is for this chip."""
    chip = device(target)
    kind = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.num_cores, platform="tpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=kind)


def compile_for(
    target: str,
    function: Callable,
    *shapes: Any,
    donate: tuple[int, ...] = (),
    options: Mapping[str, str] | None = None,
) -> jax.stages.Compiled:
    """Compiles `function(*shapes)` for one device of a TPU; nothing can be run, everything can be asked.

    Args:
      target: a key of TOPOLOGIES.
      function: traced as `jax.jit` would; bind static arguments with functools.partial. It may be jitted already.
      shapes: pytrees of `jax.ShapeDtypeStruct`, or of anything else with a shape and a dtype.
      donate: positions of the donated arguments.
      options: of the compiler, in place of its defaults.

    Returns the compiled program: `memory_analysis()` tells aliased and temporary bytes, `as_text()` the optimised HLO.
    Raises jax.errors.JaxRuntimeError where the compiler refuses (memory overflow, an unsupported layout).
    """
    sharding = SingleDeviceSharding(device(target))
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with jax.sharding.use_abstract_mesh(abstract_mesh(target)):
        traced = jax.jit(function, donate_argnums=donate).trace(*placed)
        return traced.lower(lowering_platforms=("tpu",)).compile(compiler_options=options and dict(options))
