"""Prints the packages that hold a compiler for the installed jax.

python -m tests.compile.requirements tpu | gpu
"""

from __future__ import annotations

import sys
from importlib.metadata import requires, version

from packaging.requirements import Requirement


def tpu_packages() -> list[str]:
    """libtpu, as the installed jax's own `tpu` extra pins it."""
    pins = [Requirement(line) for line in requires("jax") or []]
    return [f"{pin.name}{pin.specifier}" for pin in pins if pin.name == "libtpu"]


def gpu_packages() -> list[str]:
    """The CUDA plugin of the same version as jax, and the assembler and disassembler it calls."""
    return [
        f"jax-cuda13-plugin=={version('jax')}",
        f"jax-cuda13-pjrt=={version('jax')}",
        "nvidia-cuda-nvcc==13.*",
        "nvidia-cuda-nvdisasm==13.*",
        "nvidia-nvvm==13.*",
    ]


if __name__ == "__main__":
    chosen = {"tpu": tpu_packages, "gpu": gpu_packages}
    if len(sys.argv) != 2 or sys.argv[1] not in chosen:
        raise SystemExit(f"usage: python -m tests.compile.requirements {'|'.join(chosen)}")
    print(*chosen[sys.argv[1]](), sep="\n")
