"""The CUDA substrate's logic against a driver that keeps the driver's rules; what needs a GPU is not tested here."""

from __future__ import annotations

import builtins
import random

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import Status
from kvjax.attention.xla import BLOCK_TOKENS as XLA_BLOCK
from kvjax.virtual import VirtualSpace
from kvjax.virtual.cuda import CudaError, CudaRange, CudaSubstrate
from pallas_kernels.gpu.schedule import BLOCK
from pallas_kernels.hardware import H200
from tests.virtual.driver import BrokenRule, FakeDriver
from tests.virtual.spaces import ROWS, SPEC, make_space


@pytest.fixture
def driver(monkeypatch):
    """A driver; jax here has no CUDA device to show an array on, so the range gives one of zeros."""
    monkeypatch.setattr(CudaRange, "array", lambda self, shape, dtype: jnp.zeros((1, 1, 1), dtype))
    return FakeDriver()


def on_gpu(driver: FakeDriver) -> CudaSubstrate:
    return CudaSubstrate(driver=driver, backend=H200)


def make_range(driver: FakeDriver, num_pages: int = 16) -> CudaRange:
    substrate = on_gpu(driver)
    return substrate.reserve(make_space(substrate=substrate).layout, num_pages)


def test_a_walk_keeps_every_rule_and_leaves_nothing(driver):
    """Admit, grow, share, release, reclaim, truncate in random order; at the end all memory and addresses are back."""
    space = make_space(substrate=on_gpu(driver), max_context=8 * BLOCK, lookahead=70, watermark=2, eager_tokens=BLOCK)
    chance, lengths, seen = random.Random(0), {}, set()
    for _ in range(200):
        operation = chance.choice(["admit", "grow", "grow", "alias", "alias", "release", "reclaim", "truncate"])
        row = chance.choice(sorted(lengths)) if lengths else None
        if operation == "admit" and (row := space.admit(chance.randint(1, 480))) is not None:
            lengths[row] = 0
        elif operation == "grow" and lengths:
            wanted = np.zeros(ROWS, np.int64)
            for each in lengths:
                wanted[each] = min(lengths[each] + chance.randint(1, 96), 8 * BLOCK)
            status = space.step(wanted)
            space.follow(None)
            space.commit()
            lengths.update({each: int(wanted[each]) for each in lengths if not status[each]})
            seen |= {Status(code).name for code in status}
        elif operation == "alias" and row is not None and lengths[row] > 1:
            target = space.admit(8 * BLOCK, shared=lengths[row] - 1)
            if target is not None:
                assert space.alias(row, target, lengths[row] - 1) == Status.OK
                lengths[target] = lengths[row] - 1
        elif operation == "release" and row is not None:
            space.release(row)
            del lengths[row]
        elif operation == "reclaim":
            space.reclaim(chance.randint(1, 16))
        elif operation == "truncate" and row is not None and lengths[row]:
            lengths[row] = chance.randint(0, lengths[row])
            space.truncate(row, lengths[row])
        space.settle()
        assert space.check() == []
        for each, length in lengths.items():
            # Attention copies whole blocks: of the last one, too, every token must be memory.
            for token in range(0, length + -length % BLOCK, space.layout.page_tokens):
                driver.touch(space._rows.range._at(space._rows.place(each) + token // space.layout.page_tokens))
    assert {"OK", "OUT_OF_PAGES"} <= seen and {"cuMemcpyDtoD", "cuMemUnmap"} <= set(driver.calls)
    space.close()
    assert not driver.mappings and not driver.handles and not driver.reserved


def test_a_copy_on_write_copies_the_bytes(driver):
    space = make_space(substrate=on_gpu(driver))
    parent = space.admit(8)
    space.step(np.where(np.arange(ROWS) == parent, 5, 0))
    space.follow(None)
    space.commit()
    at = [space._rows.range._at(space._rows.place(row)) for row in range(ROWS)]
    driver.touch(at[parent])[:5] = b"token"
    child = space.admit(8, shared=5)
    assert space.alias(parent, child, 5) == Status.OK
    assert driver.touch(at[child]) is driver.touch(at[parent])
    space.step(np.where(np.arange(ROWS) == child, 6, 0))
    assert driver.touch(at[child]) is not driver.touch(at[parent])
    assert driver.touch(at[child])[:5] == b"token"
    space.close()


@pytest.mark.parametrize(("backend", "block"), [(H200, BLOCK), ("xla", XLA_BLOCK)])
def test_page_groups_hold_whole_blocks_where_reading_past_memory_is_a_fault(driver, backend, block):
    for page_group_bytes in (1, 4096, 40_000, 1 << 20):
        substrate = CudaSubstrate(driver=driver, backend=backend)
        layout = make_space(substrate=substrate, page_group_bytes=page_group_bytes).layout
        assert layout.page_tokens % block == 0 and layout.page_bytes >= page_group_bytes


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_want_of_memory_is_a_refusal_that_leaves_everything(driver, call):
    """Whichever call finds no memory, the mapping and the memory are what they were."""
    made = make_range(driver)
    assert made.map(0, 3, 2)
    mapped, mappings, handles = (
        made.mapped.copy(),
        {k: v.handle for k, v in driver.mappings.items()},
        set(driver.handles),
    )
    driver.refuse = {call}
    if call == "cuMemCreate":
        assert not made.map(1, 8, 3)
        assert not made.copy(3, 9)
        assert set(driver.handles) == handles
    elif call == "cuMemMap":
        assert not made.map(4, 8, 3)
    else:
        assert not made.map(4, 8, 1)
        assert not made.copy(3, 9)
    np.testing.assert_array_equal(made.mapped, mapped)
    assert {k: v.handle for k, v in driver.mappings.items()} == mappings
    driver.refuse = set()
    assert made.map(1, 8, 3)
    made.close()


def test_another_error_of_the_driver_is_raised(driver):
    with pytest.raises(CudaError, match="cuDeviceGet failed: CUDA_ERROR_INVALID_VALUE"):
        CudaSubstrate(3, driver=driver, backend=H200)


def _map_over(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemMap(made.address, made._layout.page_bytes, 0, 1, 0)


def _touch_without_access(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemMap(made._at(1), made._layout.page_bytes, 0, 1, 0)
    driver.touch(made._at(1))


def _release_while_mapped(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemRelease(1)


def _free_while_mapped(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemAddressFree(made.address, made._size)


def _unmap_twice(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    made.unmap(0, 1)
    driver.cuMemUnmap(made.address, made._layout.page_bytes)


def _unaligned(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemMap(made._at(1) + 64, made._layout.page_bytes, 0, 1, 0)


def _outside(made: CudaRange, driver: FakeDriver) -> None:
    made.map(0, 0, 1)
    driver.cuMemMap(made.address + made._size, made._layout.page_bytes, 0, 1, 0)


@pytest.mark.parametrize(
    "breach",
    [_map_over, _touch_without_access, _release_while_mapped, _free_while_mapped, _unmap_twice, _unaligned, _outside],
)
def test_the_fake_driver_notices_each_breach_of_its_rules(driver, breach):
    with pytest.raises(BrokenRule):
        breach(make_range(driver), driver)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def without_cuda(name, *arguments, **options):
        if name.startswith("cuda"):
            raise ImportError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_cuda)
    with pytest.raises(ImportError, match=r"kvjax\[cuda\]"):
        CudaSubstrate()


def test_page_groups_of_several_granules(driver):
    """96 KiB page-groups: sizes are multiples of the granularity, the reservation's alignment a power of two."""
    space = VirtualSpace(
        SPEC, rows=2, num_pages=4, max_context=400, page_group_bytes=72 * 1024, substrate=on_gpu(driver)
    )
    assert not space.step(np.array([1, 0]) * (space.admit(1) == 0)).any()
    space.close()
    assert not driver.reserved
