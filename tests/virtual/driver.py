"""A fake of `cuda.bindings.driver` that keeps the driver's rules, and bytes, and a record of the calls.

The rules are those documented for the virtual memory management functions of the CUDA driver API: sizes and addresses
are multiples of the granularity; a reservation's alignment is a power of two; memory is mapped only where addresses are
reserved and nothing is mapped; a mapping is taken away whole; access is set on mapped addresses only, and needed before
they are touched; addresses are freed only when nothing is mapped there.  One rule is stricter than the driver's, which
would keep such memory until it is unmapped: memory is unmapped before it is released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

GRANULARITY = 4096
_BASE = 0x7F0000000000


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class BrokenRule(AssertionError):
    """A call that the driver would refuse, or that would fault."""


@dataclass
class Mapping:
    size: int
    handle: int
    accessible: bool = False


@dataclass
class FakeDriver:
    """The driver of one device with `memory` bytes.

    Attributes:
      memory: bytes that can be allocated.
      calls: names of the calls made, in order.
      refuse: names of calls that run out of memory from now on.
    """

    memory: int = 1 << 30
    calls: list[str] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)
    reserved: dict[int, int] = field(default_factory=dict)
    handles: dict[int, bytearray] = field(default_factory=dict)
    mappings: dict[int, Mapping] = field(default_factory=dict)
    context: Any = None
    created: int = 0

    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    def cuInit(self, flags: int) -> tuple:
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple:
        return (Result.CUDA_SUCCESS, ordinal) if ordinal == 0 else (Result.CUDA_ERROR_INVALID_VALUE, None)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple:
        return Result.CUDA_SUCCESS, "context"

    def cuCtxSetCurrent(self, context: Any) -> tuple:
        self.context = context
        return (Result.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple:
        self._described(properties)
        return Result.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple:
        self._sized(size)
        _require(alignment & (alignment - 1) == 0, f"alignment {alignment} is no power of two")
        start = max([_BASE, *(first + length for first, length in self.reserved.items())])
        start = -(-start // max(alignment, GRANULARITY)) * max(alignment, GRANULARITY)
        self.reserved[start] = size
        return self._done("cuMemAddressReserve", start)

    def cuMemAddressFree(self, address: int, size: int) -> tuple:
        _require(self.reserved.get(address) == size, f"{address:#x} was not reserved with {size} bytes")
        _require(not self._inside(address, size), "addresses freed while memory is mapped there")
        del self.reserved[address]
        return self._done("cuMemAddressFree")

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple:
        self._sized(size)
        self._described(properties)
        if "cuMemCreate" in self.refuse or self.allocated() + size > self.memory:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.created += 1
        self.handles[self.created] = bytearray(size)
        return self._done("cuMemCreate", self.created)

    def cuMemRelease(self, handle: int) -> tuple:
        _require(handle in self.handles, f"handle {handle} is released already")
        _require(all(m.handle != handle for m in self.mappings.values()), "released while mapped: memory would stay")
        del self.handles[handle]
        return self._done("cuMemRelease")

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple:
        self._sized(size)
        _require(address % GRANULARITY == 0 and offset == 0 and flags == 0, "map of an unaligned address")
        _require(handle in self.handles and size <= len(self.handles[handle]), f"no such memory: {handle}")
        inside = any(first <= address and address + size <= first + length for first, length in self.reserved.items())
        _require(inside, f"{address:#x} is not reserved")
        _require(not self._inside(address, size), f"double map at {address:#x}")
        if "cuMemMap" in self.refuse:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        self.mappings[address] = Mapping(size, handle)
        return self._done("cuMemMap")

    def cuMemUnmap(self, address: int, size: int) -> tuple:
        _require(address in self.mappings and self.mappings[address].size == size, f"nothing mapped at {address:#x}")
        del self.mappings[address]
        return self._done("cuMemUnmap")

    def cuMemSetAccess(self, address: int, size: int, descriptors: list, count: int) -> tuple:
        _require(len(descriptors) == count == 1 and descriptors[0].flags == 3, "access not described")
        self._described(descriptors[0])
        inside = self._inside(address, size)
        _require(sum(self.mappings[at].size for at in inside) == size, "access set on addresses without memory")
        if "cuMemSetAccess" in self.refuse:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        for at in inside:
            self.mappings[at].accessible = True
        return self._done("cuMemSetAccess")

    def cuMemcpyDtoD(self, target: int, source: int, size: int) -> tuple:
        _require(self.context == "context", "copy without a current context")
        self.touch(target)[:size] = self.touch(source)[:size]
        return self._done("cuMemcpyDtoD")

    def cuCtxSynchronize(self) -> tuple:
        return self._done("cuCtxSynchronize")

    def touch(self, address: int) -> bytearray:
        """The bytes of the mapping that begins at an address, as a kernel would see them."""
        _require(address in self.mappings, f"illegal address {address:#x}: nothing is mapped")
        _require(self.mappings[address].accessible, f"illegal address {address:#x}: no access was set")
        return self.handles[self.mappings[address].handle]

    def allocated(self) -> int:
        return sum(len(memory) for memory in self.handles.values())

    def _inside(self, address: int, size: int) -> list[int]:
        return [at for at, m in self.mappings.items() if at < address + size and address < at + m.size]

    def _sized(self, size: int) -> None:
        _require(size > 0 and size % GRANULARITY == 0, f"{size} bytes are no multiple of the granularity")

    def _described(self, described: Any) -> None:
        _require((described.location.type, described.location.id) == (1, 0), "no such place")

    def _done(self, name: str, *values: Any) -> tuple:
        self.calls.append(name)
        return Result.CUDA_SUCCESS, *values


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise BrokenRule(rule)
