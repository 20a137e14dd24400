"""A jax array over memory that we mapped ourselves, at its own address: a DLPack capsule made by hand.

numpy's export has no bfloat16 and cannot describe another device; the struct is small enough to fill in
(https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

CPU, CUDA = 1, 2
"""DLDeviceType."""

_CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4}


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor, its DLTensor spelled out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def array_at(address: int, shape: tuple[int, ...], dtype: str, *, device: int = CPU, index: int = 0) -> jax.Array:
    """A dense row-major jax array of the memory at `address`, on which no ownership is taken.

    Args:
      address: a multiple of 64.
      shape: its shape.
      dtype: integers, floats of 16 to 64 bits, or bfloat16.
      device: CPU or CUDA.
      index: which of them.

    The memory must outlive every use of the array; writes to it show in the array.

    Raises:
      ValueError: an address that XLA would copy from, or a dtype DLPack cannot name.
    """
    if address % 64:
        raise ValueError(f"{address=:#x} must be a multiple of 64 bytes, or the array would be a copy")
    kind = np.dtype(dtype)
    code = _CODES.get(kind.name, _CODES.get(kind.kind) if kind.num < 256 else None)
    if code is None:
        raise ValueError(f"{dtype=} cannot be handed over by DLPack; use bfloat16, a float or an integer")
    return jax.dlpack.from_dlpack(_Exporter(address, shape, code, 8 * kind.itemsize, device, index), copy=False)


class _Exporter:
    """An object with the two methods of the protocol."""

    def __init__(self, address: int, shape: tuple[int, ...], code: int, bits: int, device: int, index: int):
        self._device = (device, index)
        self._described = (address, shape, code, bits)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        address, shape, code, bits = self._described
        # Struct and shape in one block of malloc, with `free` itself as its deleter: arrays may outlive the
        # interpreter, so no Python must be needed to delete them.
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        size = ctypes.sizeof(_ManagedTensor)
        block = libc.malloc(size + 8 * len(shape))
        if not block:
            raise MemoryError("no memory to describe an array")
        (ctypes.c_int64 * len(shape)).from_address(block + size)[:] = list(shape)
        tensor = _ManagedTensor.from_address(block)
        tensor.data, tensor.byte_offset, tensor.strides, tensor.manager_ctx = address, 0, None, None
        tensor.device.type, tensor.device.id = self._device
        tensor.ndim, tensor.shape = len(shape), block + size
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, 1
        tensor.deleter = ctypes.cast(libc.free, ctypes.c_void_p).value
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(block, b"dltensor", None)
