"""The CUDA substrate: the driver's virtual memory management (cuMemAddressReserve, cuMemCreate, cuMemMap).

Needs the package `cuda-bindings` and an NVIDIA driver; both are looked for when a `CudaSubstrate` is made.  Stock
drivers map 2 MiB at a time (`granularity` asks).  Reading an address without memory is a fault here, and attention
reads whole blocks, so a page-group holds whole blocks of tokens: 64, or 128 for plain XLA.

Unlike on the host, a cache kept from a step before its row was released is not noticed: its stores go to whoever holds
the memory now.  Take a new `VirtualSpace.cache()` for each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32, Shaped

from kvjax.attention.paged import Backend, choose_backend
from kvjax.attention.xla import BLOCK_TOKENS as XLA_BLOCK
from kvjax.virtual.dlpack import CUDA, array_at
from kvjax.virtual.span import SpanLayout
from pallas_kernels.gpu.schedule import BLOCK as KERNEL_BLOCK


class CudaError(RuntimeError):
    """A driver call that failed.

    Attributes:
      function: its name.
      code: the driver's CUresult.
    """

    def __init__(self, function: str, code: Any):
        super().__init__(f"{function} failed: {getattr(code, 'name', code)}")
        self.function, self.code = function, code


class CudaSubstrate:
    """One GPU's virtual memory.

    Attributes:
      granularity: bytes the driver maps at a time.
      backend: what attends.
    """

    granularity: int
    backend: Backend

    def __init__(self, device: int = 0, *, driver: Any = None, backend: Backend | None = None):
        """Opens the driver.

        Args:
          device: the GPU, by the driver's and jax's number.
          driver: what to use as `cuda.bindings.driver`.
          backend: what attends: facts of a GPU for kvjax's kernel, or "xla"; by the GPU if None.

        Raises:
          ImportError: `cuda-bindings` is not installed.
          NotImplementedError: no kernels for this GPU; pass backend="xla".
          OSError: no NVIDIA driver.
          CudaError: the driver has no such device.
        """
        self._calls = _Calls(_load_driver() if driver is None else driver, device)
        self.device, self.granularity = device, self._calls.granularity()
        if backend is None:
            backend = choose_backend("gpu", jax.devices("gpu")[device].device_kind)
        self.backend = backend

    @property
    def reads_at_once(self) -> int:
        return XLA_BLOCK if self.backend == "xla" else KERNEL_BLOCK

    def reserve(self, layout: SpanLayout, num_pages: int) -> CudaRange:
        """Raises CudaError if the driver has not this much address space."""
        return CudaRange(layout, num_pages, self._calls, self.device)


class CudaRange:
    """An `AddressRange` in one GPU's memory; see there for what the methods promise.

    Each page-group is one allocation, made when it is first mapped and kept until `close`.
    """

    def __init__(self, layout: SpanLayout, num_pages: int, calls: _Calls, device: int):
        self._layout, self._none, self._calls, self._device = layout, num_pages, calls, device
        places = layout.rows * layout.span_pages
        self.mapped = np.full(places, num_pages, np.int32)
        self.generation = np.zeros(layout.rows, np.int32)
        self._handles: dict[int, Any] = {}
        self._arrays: list[jax.Array] = []
        # Two places more, for a copy's source and target.
        self._size = (places + 2) * layout.page_bytes
        self.address = calls.reserve(self._size, layout.page_bytes)
        self._windows = (self._at(places), self._at(places + 1))
        self._closed = False
        self.store, self.handle = partial(_store, layout, self.address), 0  # the address is part of the program

    def map(self, place: int, page: int, count: int) -> bool:
        if not self._commit(range(page, page + count)):
            return False
        before = self.mapped[place : place + count].copy()
        try:
            for index in range(count):
                self._clear(place + index)
                self._calls.map(self._at(place + index), self._layout.page_bytes, self._handles[page + index])
                self.mapped[place + index] = page + index
            self._calls.allow(self._at(place), count * self._layout.page_bytes)
        except CudaError as error:
            self._put_back(place, before)
            return _unless_refused(error)
        return True

    def unmap(self, place: int, count: int) -> bool:
        for index in range(count):
            self._clear(place + index)
        return True

    def copy(self, source: int, target: int) -> bool:
        """Also waits until the copy is done: what is copied may be written to next."""
        if not self._commit([source, target]):
            return False
        size, shown = self._layout.page_bytes, []
        try:
            for window, page in zip(self._windows, (source, target), strict=True):
                self._calls.map(window, size, self._handles[page])
                shown.append(window)
                self._calls.allow(window, size)
            self._calls.copy(self._windows[1], self._windows[0], size)
        except CudaError as error:
            return _unless_refused(error)
        finally:
            for window in shown:
                self._calls.unmap(window, size)
        return True

    def array(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        array = array_at(self.address, shape, dtype, device=CUDA, index=self._device)
        self._arrays.append(array)
        return array

    def resident_bytes(self) -> int:
        return len(self._handles) * self._layout.page_bytes

    def close(self) -> None:
        """The addresses are free afterwards: a program still reading them would fault, so wait for all of them."""
        if self._closed:
            return
        self._closed = True
        for array in self._arrays:
            array.delete()
        self._arrays.clear()
        self.unmap(0, len(self.mapped))
        self._release(list(self._handles))
        self._calls.free(self.address, self._size)

    def _at(self, place: int) -> int:
        return self.address + place * self._layout.page_bytes

    def _commit(self, pages: Iterable[int]) -> bool:
        """Memory for pages that have none yet; all, or none if the driver has not enough."""
        made: list[int] = []
        for page in pages:
            if page not in self._handles:
                try:
                    self._handles[page] = self._calls.create(self._layout.page_bytes)
                except CudaError as error:
                    self._release(made)
                    return _unless_refused(error)
                made.append(page)
        return True

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._calls.release(self._handles.pop(page))

    def _clear(self, place: int) -> None:
        if self.mapped[place] != self._none:
            self._calls.unmap(self._at(place), self._layout.page_bytes)
            self.mapped[place] = self._none

    def _put_back(self, place: int, before: Int32[np.ndarray, " count"]) -> None:
        size = self._layout.page_bytes
        for index, page in enumerate(before):
            self._clear(place + index)
            if page != self._none:
                self._calls.map(self._at(place + index), size, self._handles[int(page)])
                self._calls.allow(self._at(place + index), size)
                self.mapped[place + index] = page


def _store(
    layout: SpanLayout,
    address: int,
    handle: Int32[Array, ""],
    order: Int32[Array, ""],
    row: Int32[Array, " packed"],
    position: Int32[Array, " packed"],
    generation: Int32[Array, " packed"],
    start: Int32[Array, ""],
    values: Shaped[Array, "packed elements"],
) -> Int32[Array, ""]:
    """`AddressRange.store` by a kernel."""
    from pallas_kernels.gpu.store_through import store_through  # Mosaic GPU: imported when used

    del handle, generation
    elements = layout.record_bytes // values.dtype.itemsize
    sizes = {"rows": layout.rows, "row_elements": layout.span_tokens * elements, "token_elements": elements}
    return store_through(order, row, position, start, values, address=address, **sizes)


class _Calls:
    """The driver calls in use, for one device, each raising CudaError."""

    def __init__(self, driver: Any, device: int):
        self._driver, self._device = driver, device
        self._call("cuInit", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        location = (driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for described in (self._properties, self._access):
            described.location.type, described.location.id = location

    def granularity(self) -> int:
        minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))

    def reserve(self, size: int, alignment: int) -> int:
        # Page-groups may be several granules; the driver asks for a power of two.
        return int(self._call("cuMemAddressReserve", size, alignment & -alignment, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        return self._call("cuMemCreate", size, self._properties, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def copy(self, target: int, source: int, size: int) -> None:
        self._call("cuCtxSetCurrent", self._context)  # of the calling thread, which may be the background's
        self._call("cuMemcpyDtoD", target, source, size)
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._driver, name)(*arguments)
        if int(code) != 0:
            raise CudaError(name, code)
        return values[0] if values else None


_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


def _unless_refused(error: CudaError) -> bool:
    """False for want of memory; anything else is raised."""
    if int(error.code) != _OUT_OF_MEMORY:
        raise error
    return False


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(
            "CudaSubstrate needs the package cuda-bindings: pip install 'kvjax[cuda]'. "
            "HostSubstrate is the same on a CPU"
        ) from error
    try:
        driver.cuInit(0)
    except RuntimeError as error:  # how cuda-bindings says that there is no libcuda
        raise OSError("CudaSubstrate needs an NVIDIA driver, and none was found on this machine") from error
    return driver
