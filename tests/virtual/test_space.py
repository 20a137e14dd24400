"""What a virtual space promises, one scenario a promise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import kvjax
from kvjax import Status
from kvjax.virtual import AreaBudget, HostSubstrate, VirtualSpace
from kvjax.virtual.flight import Flight
from tests.virtual.spaces import CONTEXT, PAGE, ROWS, contents, extend, fill, make_space


def test_a_shared_prefix_is_the_same_memory():
    """Two rows share a 1,000-token prefix in the same physical pages, by the kernel's account and by their bytes."""
    spec = kvjax.CacheSpec.uniform(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    space = VirtualSpace(spec, rows=4, num_pages=64, max_context=2048, page_group_bytes=65536, lookahead=0)
    first, second = space.admit(1000), space.admit(1000, shared=1000)
    lengths = np.where(np.arange(4) == first, 1000, 0)
    assert not space.step(lengths).any()
    space.commit()
    before = space.figures().resident_bytes
    assert space.alias(first, second, 1000) == Status.OK
    assert space.figures().resident_bytes == before
    memory = space._rows.range._views["float32"]
    memory[first, :1000] = np.arange(1000)[:, None]
    np.testing.assert_array_equal(memory[second, :1000], memory[first, :1000])
    frames = [_frames(memory[row, :1000]) for row in (first, second)]
    assert frames[0] == frames[1]
    space.close()


def _frames(tokens: np.ndarray) -> list[int]:
    """Physical frames behind an array, from /proc/self/pagemap; zeros where the kernel hides them."""
    start, size = tokens.ctypes.data, tokens.nbytes
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(start // 4096 * 8)
        entries = np.frombuffer(file.read(-(-size // 4096) * 8), np.uint64)
    assert np.all(entries >> np.uint64(63) == 1), "a page is not present"
    return (entries & np.uint64((1 << 55) - 1)).tolist()


def test_writing_to_a_shared_page_group_copies_it_first():
    space = make_space()
    parent = fill(space, 12)
    child = space.admit(20, shared=12)
    assert space.alias(parent, child, 11) == Status.OK
    assert not extend(space, {child: [100]})[child]
    assert not extend(space, {parent: [200]})[parent]
    assert contents(space, parent, 13) == [*range(1, 13), 200]
    assert contents(space, child, 12) == [*range(1, 12), 100]
    assert space.figures().counters.copies == 1
    assert space.check() == []
    space.close()


def test_when_both_write_one_keeps_the_page_group():
    space = make_space()
    parent = fill(space, 12)
    child = space.admit(20, shared=12)
    space.alias(parent, child, 12)
    assert not extend(space, {parent: [200], child: [100]}).any()
    assert contents(space, parent, 13) == [*range(1, 13), 200]
    assert contents(space, child, 13) == [*range(1, 13), 100]
    assert space.figures().held_bytes == 3 * space.layout.page_bytes
    space.close()


def test_a_released_row_is_reused_as_it_is_mapped():
    space = make_space()
    short, long = fill(space, 8), fill(space, 40)
    space.release(long)
    space.release(short)
    calls = space.figures().counters.map_calls
    assert space.admit(33) == long
    assert space.admit(8) == short
    extend(space, {long: list(range(50, 83)), short: [7]})
    assert contents(space, long, 33) == list(range(50, 83))
    figures = space.figures()
    assert figures.counters.map_calls == calls
    assert figures.counters.reused_pages == 6
    assert space.check() == []
    space.close()


def test_a_request_with_the_same_prefix_reuses_the_rest():
    """The shared part of a parked row is mapped already, and what follows it is kept."""
    space = make_space()
    parent = fill(space, 16)
    child = space.admit(32, shared=16)
    space.alias(parent, child, 16)
    extend(space, {child: [9] * 16})
    space.release(child)
    calls = space.figures().counters.map_calls
    assert space.admit(30, shared=16) == child
    assert space.alias(parent, child, 16) == Status.OK
    extend(space, {child: [5] * 14})
    assert contents(space, child, 30) == [*range(1, 17), *[5] * 14]
    assert space.figures().counters.map_calls == calls
    assert space.check() == []
    space.close()


def test_reclaim_gives_up_the_coldest_row_first():
    space = make_space()
    rows = [fill(space, 16) for _ in range(3)]
    for row in (rows[1], rows[0], rows[2]):
        space.release(row)
    assert space.reclaim(12) == 12
    none = space._rows.mapping.none
    mapped = space._rows.range.mapped.reshape(ROWS, -1)
    assert np.all(mapped[rows[1]] == none) and np.all(mapped[rows[0], :2] < none) and np.all(mapped[rows[2], :2] < none)
    assert space.reclaim(16) == 16
    assert np.all(space._rows.range.mapped == none)
    assert space.check() == []
    space.close()


def test_shortage_takes_from_parked_rows():
    space = make_space()
    for row in [fill(space, 56), fill(space, 56)]:
        space.release(row)
    row = space.admit(8)
    for length in range(8, CONTEXT, 8):
        assert not extend(space, {row: [length] * 8}).any()
    other = next(other for other in range(ROWS) if other != row)
    fill(space, 56, row=space.admit(56))
    assert space.check() == [] and other is not None
    space.close()


def test_out_of_memory_leaves_everything_as_it_was():
    """The second row does not fit; neither do later ones; nothing has moved, and the first was served."""
    space = make_space(num_pages=16)
    rows = [fill(space, 32, first=100 * index) for index in range(3)]
    late = space.admit(8)
    table = jax.device_get(space._rows.owner.table)
    mapped = space._rows.range.mapped.copy()
    status = extend(space, {rows[0]: [1] * 24, rows[1]: [2] * 24, late: [3]})
    assert [status[row] for row in (rows[0], rows[1], late)] == [Status.OK, Status.OUT_OF_PAGES, Status.OUT_OF_PAGES]
    kept = space._rows.range.mapped.reshape(ROWS, -1)[rows[1:]]
    np.testing.assert_array_equal(kept, mapped.reshape(ROWS, -1)[rows[1:]])
    after = jax.device_get(space._rows.owner.table)
    np.testing.assert_array_equal(after.groups[0].end[rows[1:]], table.groups[0].end[rows[1:]])
    for index, row in enumerate(rows):
        assert contents(space, row, 32) == [100 * index + step for step in range(32)]
    assert space.check() == []
    space.close()


@pytest.mark.parametrize("refused", ["memory", "areas"])
def test_what_the_kernel_refuses_is_a_status(refused, monkeypatch):
    """No memory for a file, or no more memory areas: the table is put back, and the row goes on once there is some."""
    areas = AreaBudget(limit=1000)
    space = make_space(substrate=HostSubstrate(areas))
    row = fill(space, 8)
    with monkeypatch.context() as patch:
        if refused == "memory":
            patch.setattr("os.posix_fallocate", _no_memory)
        else:
            patch.setattr(areas, "limit", areas.used)
            space._rows.owner.reserve(np.array([0, 8, 0, 0]) if row == 0 else np.array([8, 0, 0, 0]))  # not adjacent
        before, mapped = jax.device_get(space._rows.owner.table.groups), space._rows.range.mapped.copy()
        assert extend(space, {row: [5]})[row] == Status.OUT_OF_PAGES
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(space._rows.owner.table.groups), before)
        np.testing.assert_array_equal(space._rows.range.mapped, mapped)
    assert not extend(space, {row: [5]})[row]
    assert contents(space, row, 9) == [*range(1, 9), 5]
    space.close()


def _no_memory(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_statuses_without_memory_at_stake():
    space = make_space()
    row = fill(space, 8)
    other = space.admit(8)
    assert space.step(np.where(np.arange(ROWS) == row, CONTEXT + 1, 0))[row] == Status.TABLE_FULL
    unused = next(index for index in range(ROWS) if index not in (row, other))
    assert space.step(np.where(np.arange(ROWS) == unused, 1, 0))[unused] == Status.EMPTY
    assert space.alias(row, other, 9) == Status.NOT_RESERVED
    assert space.alias(row, unused, 8) == Status.EMPTY
    assert space.alias(row, other, 8) == Status.OK
    assert space.alias(row, other, 8) == Status.ROW_BUSY
    with pytest.raises(ValueError, match="granted"):
        space.commit(np.where(np.arange(ROWS) == row, 20, 0))
    with pytest.raises(ValueError, match="released already"):
        space.release(unused)
    space.close()


def test_pinned_page_groups_outlive_their_row():
    space = make_space()
    row = fill(space, 20)
    pages = space.pin(row, 20)
    extend(space, {row: [77]})
    space.release(row)
    space.reclaim(16)
    heir = space.admit(24, shared=20)
    assert space.adopt(heir, pages, 20) == Status.OK
    extend(space, {heir: [88]})
    assert contents(space, heir, 21) == [*range(1, 21), 88]
    space.unpin(pages)
    assert space.check() == []
    space.close()


def test_truncated_tokens_are_written_again():
    space = make_space()
    row = fill(space, 30)
    space.truncate(row, 9)
    extend(space, {row: [40, 41]})
    assert contents(space, row, 11) == [*range(1, 10), 40, 41]
    assert space.figures().held_bytes == 2 * space.layout.page_bytes
    assert space.check() == []
    space.close()


class _HeldUp:
    """A step that waits at a gate before it reads a row.  (jax on a CPU runs a program with callbacks in the caller's
    thread, so it has one of its own.)"""

    def __init__(self, memory: jax.Array):
        self.gate = threading.Event()
        self._future = ThreadPoolExecutor(1).submit(lambda: np.asarray(self._read(memory)))

    def _read(self, memory: jax.Array) -> jax.Array:
        def wait() -> np.int32:
            assert self.gate.wait(60)
            return np.int32(0)

        first = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(lambda memory: memory[io_callback(wait, first), :8, 0])(memory)

    def is_ready(self) -> bool:
        return self._future.done()

    def block_until_ready(self) -> list[float]:
        return self._future.result().tolist()


@pytest.mark.parametrize("fenced", [True, False])
def test_memory_stays_under_a_step_in_flight(fenced, monkeypatch):
    """A row is released and reclaimed while a step that reads it waits.  Without the fence the step reads zeros."""
    if not fenced:
        monkeypatch.setattr(Flight, "poll", lambda self: self.issued)
    space = make_space()
    row = fill(space, 8)
    assert row == 0
    (memory,) = space.cache().memory.values()
    space.step(np.array([8, 0, 0, 0]))
    step = _HeldUp(memory)
    space.follow(step)
    space.release(row)
    space.reclaim(16)
    step.gate.set()
    intact = step.block_until_ready() == list(range(1, 9))
    assert intact == fenced
    assert space.reclaim(16) == 16
    space.close()


def test_steady_decode_never_waits_for_a_mapping():
    """After warm-up every mapping was made ahead by the background thread."""
    space = make_space(lookahead=4)
    rows = [fill(space, 8, first=10 * index) for index in range(2)]
    space.settle()
    stalls = space.figures().counters.stalls
    for token in range(40):
        assert not extend(space, {row: [token] for row in rows}).any()
        space.settle()  # a step of a real model takes longer than its mappings
    figures = space.figures()
    assert figures.counters.stalls == stalls
    assert figures.counters.ahead_calls >= 10
    for index, row in enumerate(rows):
        assert contents(space, row, 48) == [*range(10 * index, 10 * index + 8), *range(40)]
    assert space.check() == []
    space.close()


def test_one_unused_row_is_mapped_eagerly():
    space = make_space(eager_tokens=16)
    fill(space, 8)
    space.settle()
    assert space.figures().parked_bytes == 2 * space.layout.page_bytes
    row = space.admit(16)
    stalls = space.figures().counters.map_calls
    extend(space, {row: [3] * 16})
    assert contents(space, row, 16) == [3] * 16
    assert space.figures().counters.map_calls >= stalls
    assert space.figures().counters.reused_pages == 2
    space.settle()
    assert space.check() == []
    space.close()


def test_an_error_of_the_background_thread_is_raised(monkeypatch):
    space = make_space(lookahead=8)
    row = fill(space, 8)
    space.settle()
    monkeypatch.setattr("os.posix_fallocate", _broken)
    extend(space, {row: [1]})
    with pytest.raises(OSError, match="broken"):
        space.settle()
    with pytest.raises(OSError, match="broken"):
        space.step(np.zeros(ROWS, np.int64))


def _broken(*_: object) -> None:
    raise OSError(5, "broken")


def test_a_window_group_is_refused():
    spec = kvjax.CacheSpec.uniform(layers=1, kv_heads=1, head_dim=8, window=4)
    with pytest.raises(NotImplementedError, match="window=None"):
        VirtualSpace(spec, rows=1, num_pages=1, max_context=8)


def test_page_groups_hold_whole_tokens():
    spec = kvjax.CacheSpec.uniform(layers=30, kv_heads=3, head_dim=64, dtype="float32")
    space = VirtualSpace(spec, rows=2, num_pages=4, max_context=1000, page_group_bytes=65536)
    assert (space.layout.record_bytes, space.layout.page_tokens, space.layout.page_bytes) == (46080, 4, 184320)
    assert space.layout.span_tokens % 128 == 0
    space.close()
    assert PAGE * 512 == 4096
