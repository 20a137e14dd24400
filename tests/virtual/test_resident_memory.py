"""Memory grows with the tokens that rows hold and not with what they reserve, by the kernel's own account."""

import mmap

import pytest

from experiments.resident_measure import Resident, serve
from kvjax.virtual.host import HostRange

ROWS, USED, GROUP, TOKEN = 64, 1000, 65536, 2048


def most(tokens: int) -> float:
    """1.1 × the bytes of the tokens, and a page-group a row."""
    return 1.1 * tokens * TOKEN + ROWS * GROUP


def too_much(memory: Resident) -> list[str]:
    """The accounts that show more than the tokens are allowed, or less than they need."""
    tokens = ROWS * USED
    accounts = {"file": memory.blocks, "Rss": memory.rss, "Pss": memory.pss}
    return [name for name, size in accounts.items() if not tokens * TOKEN <= size <= most(tokens)]


def test_a_row_that_reserves_32_times_what_it_uses_costs_what_it_uses():
    space, memory = serve(rows=ROWS, max_context=32768, used=USED, page_group_bytes=GROUP)
    assert space.figures().reserved_bytes >= ROWS * 32768 * TOKEN and space.layout.page_bytes == GROUP
    assert too_much(memory) == [] and space.check() == []
    space.close()


def test_a_shared_prefix_is_in_memory_once_and_mapped_by_every_row():
    space, memory = serve(rows=ROWS, max_context=32768, used=USED, shared=USED, page_group_bytes=GROUP)
    assert memory.blocks <= most(USED) - (ROWS - 1) * GROUP and memory.pss <= most(USED) - (ROWS - 1) * GROUP
    assert memory.rss >= ROWS * USED * TOKEN
    space.close()


def populated(real):
    """Addresses are reserved with memory behind them."""

    def reserve(self, address, size, protection, flags, file, offset):
        if address is None:
            protection, flags = protection | mmap.PROT_WRITE, (flags & ~mmap.MAP_NORESERVE) | mmap.MAP_POPULATE
        return real(self, address, size, protection, flags, file, offset)

    return reserve


def all_at_once(real):
    """The first page-group that is wanted brings all of them."""

    def commit(self, page, count):
        return real(self, 0, len(self._committed))

    return commit


@pytest.mark.parametrize(
    ("name", "broken", "shown_by"), [("_mmap", populated, ["Rss", "Pss"]), ("_commit", all_at_once, ["file"])]
)
def test_memory_that_a_reservation_touches_is_noticed(name, broken, shown_by, monkeypatch):
    monkeypatch.setattr(HostRange, name, broken(getattr(HostRange, name)))
    space, memory = serve(rows=ROWS, max_context=2048, used=USED, page_group_bytes=GROUP)
    assert too_much(memory) == shown_by
    space.close()
