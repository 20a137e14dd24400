"""The host's substrate by itself: what Linux says of the mappings, and what happens at their end."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

from kvjax.virtual import AreaBudget, HostSubstrate
from kvjax.virtual.dlpack import array_at
from kvjax.virtual.host import HostRange
from tests.virtual.spaces import PAGE, SPEC, make_space


def make_range(areas: AreaBudget, num_pages: int = 16) -> HostRange:
    space = make_space()
    layout = space.layout
    space.close()
    return HostSubstrate(areas).reserve(layout, num_pages)


def areas_in(made: HostRange) -> int:
    """Memory areas inside the range, as the kernel lists them."""
    end = made.address + made._size
    with open("/proc/self/maps") as file:
        starts = [int(line.split("-", 1)[0], 16) for line in file]
    return sum(made.address < start < end for start in starts)


def test_memory_areas_are_counted_as_the_kernel_does():
    """After each of many random mappings, the count is the number of areas that /proc/self/maps shows."""
    areas = AreaBudget(limit=10_000)
    made, chance = make_range(areas), random.Random(0)
    for _ in range(200):
        count = chance.randint(1, 4)
        place = chance.randrange(1, len(made.mapped) - count - 1)
        if chance.random() < 0.7:
            assert made.map(place, chance.randrange(16 - count), count)
        else:
            assert made.unmap(place, count)
        assert areas.used == areas_in(made)
    made.close()
    assert areas.used == 0


def test_a_page_shows_wherever_it_is_mapped():
    made = make_range(AreaBudget(1000))
    assert made.map(0, 5, 1) and made.map(3, 5, 1) and made.map(1, 6, 1)
    view = made._views["float32"].reshape(-1, PAGE, 128)
    view[0], view[1] = 7, 8
    assert np.all(view[3] == 7)
    assert made.copy(6, 5)
    assert np.all(view[[0, 3]] == 8)
    assert made.unmap(0, 1)
    assert np.all(view[0] == 0) and np.all(view[3] == 8)
    assert made.resident_bytes() == 2 * 4096
    made.close()


def test_after_close_arrays_say_so_and_addresses_do_not_fault():
    made = make_range(AreaBudget(1000))
    made.map(0, 0, 1)
    view, array = made._views["float32"], made.array((1, PAGE, 128), "float32")
    view[0, 0] = 3
    assert np.all(np.asarray(array)[0, 0] == 3)
    made.close()
    made.close()
    assert array.is_deleted()
    assert np.all(view[0] == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
def test_arrays_stand_at_their_address(dtype):
    memory = np.zeros(4096 + 64, np.uint8)
    address = -(-memory.ctypes.data // 64) * 64
    array = array_at(address, (2, 3), dtype)
    assert array.unsafe_buffer_pointer() == address and array.dtype == dtype and array.shape == (2, 3)
    memory[:] = 1
    assert np.all(np.asarray(array).view(np.uint8) == 1)
    jax.block_until_ready(array)
    array.delete()


def test_what_dlpack_cannot_say_is_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        array_at(4096 + 8, (1,), "float32")
    with pytest.raises(ValueError, match="handed over"):
        array_at(4096, (1,), "float8_e4m3fn")
    assert SPEC.bytes_per_token == 512
