"""The host's substrate: Linux pages.  Real page tables, real aliasing, and no copy into JAX on a CPU.

Memory is one `memfd` file, a page-group a piece of it; addresses are one read-only anonymous reservation over which
pieces are mapped with MAP_FIXED, any piece at any place and at several at once.  Read-only, not inaccessible: XLA
reads whole blocks, so past what is mapped too, and finds zeros there.

What the kernel may refuse is asked for where it can be refused: memory by `fallocate` before it is mapped, so that no
touch of it can end in SIGBUS; and areas (`vm.max_map_count`) are counted, since a process that runs out of them can no
longer allocate at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Int32, Shaped

from kvjax.attention.paged import Backend
from kvjax.virtual.dlpack import array_at
from kvjax.virtual.span import SpanLayout

_PROT_READ, _PROT_WRITE = 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_REFUSALS = (errno.ENOMEM, errno.ENOSPC, errno.EAGAIN, errno.EDQUOT)
_SPARE_AREAS = 4096
"""Memory areas left to everything else in the process: threads, libraries, large allocations."""


@dataclass(slots=True)
class AreaBudget:
    """Memory areas that ranges may still add to the process's.

    Attributes:
      limit: areas that all ranges together may use.
      used: areas they use.
    """

    limit: int
    used: int = 0

    @classmethod
    def of_process(cls) -> AreaBudget:
        """What the kernel allows the process, less what it has and some to spare."""
        with open("/proc/sys/vm/max_map_count") as file:
            allowed = int(file.read())
        with open("/proc/self/maps") as file:
            present = sum(1 for _ in file)
        return cls(max(0, allowed - present - _SPARE_AREAS))


@dataclass(frozen=True, slots=True)
class HostSubstrate:
    """Linux virtual memory.

    Attributes:
      areas: how many memory areas its ranges may use; they share it.
    """

    areas: AreaBudget = field(default_factory=AreaBudget.of_process)

    @property
    def granularity(self) -> int:
        return os.sysconf("SC_PAGE_SIZE")

    @property
    def backend(self) -> Backend:
        return "xla"

    @property
    def reads_at_once(self) -> int:
        return 1

    def reserve(self, layout: SpanLayout, num_pages: int) -> HostRange:
        """Raises OSError if the kernel has not this much address space."""
        return HostRange(layout, num_pages, self.areas)


class HostRange:
    """An `AddressRange` over one memfd; see there for what the methods promise."""

    def __init__(self, layout: SpanLayout, num_pages: int, areas: AreaBudget):
        self.store, self.handle = store, next(_HANDLES)
        self._layout, self._num_pages, self._areas = layout, num_pages, areas
        self._libc = _libc()
        places = layout.rows * layout.span_pages
        self.mapped = np.full(places, num_pages, np.int32)
        self.generation = np.zeros(layout.rows, np.int32)
        self._committed = np.zeros(num_pages, bool)
        self._arrays: list[jax.Array] = []
        self._size = places * layout.page_bytes
        self.address = self._mmap(None, self._size, _PROT_READ, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self._file = os.memfd_create("kvjax", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_pages * layout.page_bytes)
        memory = (ctypes.c_uint8 * self._size).from_address(self.address)
        self._views = {
            dtype: np.frombuffer(memory, np.dtype(dtype)).reshape(layout.shape(dtype)) for dtype in layout.dtypes
        }
        _RANGES[self.handle] = self

    def map(self, place: int, page: int, count: int) -> bool:
        if not self._commit(page, count):
            return False
        pages = np.arange(page, page + count, dtype=np.int32)
        return self._replace(place, pages, lambda: self._map_file(place, page, count))

    def unmap(self, place: int, count: int) -> bool:
        pages = np.full(count, self._num_pages, np.int32)
        return self._replace(place, pages, lambda: self._map_nothing(place, count))

    def copy(self, source: int, target: int) -> bool:
        if not self._commit(target, 1):
            return False
        size = self._layout.page_bytes
        done = 0
        while done < size:
            piece = os.pread(self._file, size - done, source * size + done)
            done += os.pwrite(self._file, piece, target * size + done)
        return True

    def array(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            array = array_at(self.address, shape, dtype)
        self._arrays.append(array)
        return array

    def resident_bytes(self) -> int:
        return os.fstat(self._file).st_blocks * 512

    def close(self) -> None:
        """Addresses stay reserved, as zeros, until the process ends: a program still running may read, never fault."""
        if self._file < 0:
            return
        _RANGES.pop(self.handle, None)
        for array in self._arrays:
            array.delete()
        self._arrays.clear()
        self._views.clear()
        self._areas.used -= self._boundaries(0, len(self.mapped))
        self.mapped[:] = self._num_pages
        self._mmap(self.address, self._size, _PROT_READ, _FIXED_NOTHING, -1, 0)
        os.close(self._file)
        self._file = -1

    def _commit(self, page: int, count: int) -> bool:
        """Memory for pages that have none yet."""
        size = self._layout.page_bytes
        missing = page + np.flatnonzero(~self._committed[page : page + count])
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1) if len(missing) else ():
            try:
                os.posix_fallocate(self._file, int(run[0]) * size, len(run) * size)
            except OSError as error:
                if error.errno in _REFUSALS:
                    return False
                raise
            self._committed[run] = True
        return True

    def _replace(self, place: int, pages: Int32[np.ndarray, " count"], change: Callable[[], None]) -> bool:
        """Makes a change of the mapping, and enters it, unless it would take too many areas or the kernel refuses."""
        count = len(pages)
        before, were = self.mapped[place : place + count].copy(), self._boundaries(place, count)
        self.mapped[place : place + count] = pages
        more = self._boundaries(place, count) - were
        allowed = more <= 0 or self._areas.used + more <= self._areas.limit
        if allowed:
            try:
                change()
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                allowed = False
        if allowed:
            self._areas.used += more
        else:
            self.mapped[place : place + count] = before
        return allowed

    def _boundaries(self, place: int, count: int) -> int:
        """Edges between memory areas in and around places [place, place + count)."""
        around = self.mapped[max(place - 1, 0) : place + count + 1]
        left, right = around[:-1], around[1:]
        none = self._num_pages
        return int(np.count_nonzero(np.where(left == none, right != none, right != left + 1)))

    def _map_file(self, place: int, page: int, count: int) -> None:
        size = self._layout.page_bytes
        flags = _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        address = self.address + place * size
        self._mmap(address, count * size, _PROT_READ | _PROT_WRITE, flags, self._file, page * size)

    def _map_nothing(self, place: int, count: int) -> None:
        size = self._layout.page_bytes
        self._mmap(self.address + place * size, count * size, _PROT_READ, _FIXED_NOTHING, -1, 0)

    def _mmap(self, address: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
        got = self._libc.mmap(address, size, protection, flags, file, offset)
        if got == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {size} bytes at {address} refused: {os.strerror(code)}")
        return got

    def put(
        self,
        row: Int32[np.ndarray, " packed"],
        position: Int32[np.ndarray, " packed"],
        generation: Int32[np.ndarray, " packed"],
        start: int,
        values: Shaped[np.ndarray, "packed elements"],
    ) -> None:
        """Stores values as `store` says, now; called by a running program, in a thread of its own."""
        kept = np.flatnonzero(row < self._layout.rows)
        row, position, generation = row[kept], position[kept], generation[kept]
        place = row * self._layout.span_pages + position // self._layout.page_tokens
        # The mapping is asked at the last moment: a store to a place without a page would be a fault of the process.
        writable = (self.generation[row] == generation) & (self.mapped[place] != self._num_pages)
        row, position, values = row[writable], position[writable], values[kept[writable]]
        if len(row):
            self._views[values.dtype.name][row, position, start : start + values.shape[1]] = values


_RANGES: WeakValueDictionary[int, HostRange] = WeakValueDictionary()
_HANDLES = count(1)


def store(
    handle: Int32[Array, ""],
    order: Int32[Array, ""],
    row: Int32[Array, " packed"],
    position: Int32[Array, " packed"],
    generation: Int32[Array, " packed"],
    start: Int32[Array, ""],
    values: Shaped[Array, "packed elements"],
) -> Int32[Array, ""]:
    """`AddressRange.store` by a callback.

    The range is named by a number at run time, so that one compiled program serves every space of a layout, and keeps
    none of them alive.
    """
    done = jax.ShapeDtypeStruct((), jnp.int32)
    return io_callback(_store_now, done, handle, order, row, position, generation, start, values)


def _store_now(handle: Any, order: Any, row: Any, position: Any, generation: Any, start: Any, values: Any) -> np.int32:
    del order  # Its being there is its whole use.
    # A range that is gone has no memory to store to.
    if (range_ := _RANGES.get(int(handle))) is not None:
        range_.put(np.asarray(row), np.asarray(position), np.asarray(generation), int(start), np.asarray(values))
    return np.int32(0)


_FIXED_NOTHING = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    return libc
