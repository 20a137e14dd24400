"""The pure-Python pool that experiments compare with does the same work, by the same model as the page table."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.python_pool import BlockPool
from kvjax.pages import GroupShape, Status
from tests.pages.model import Model

ROWS, BOUND = 6, 10_000


def compare(pool: BlockPool, model: Model) -> None:
    """Lengths, holders, free blocks, and that one block is one page."""
    assert pool.length == [row.length for row in model.rows] and len(pool.free) == model.free[0]
    place: dict[int, int] = {}
    for blocks, row in zip(pool.blocks, model.rows, strict=True):
        assert len(blocks) == len(row.pages[0])
        for block, page in zip(blocks, row.pages[0], strict=True):
            assert place.setdefault(page.serial, block) == block and pool.refcount[block] == page.holders
    assert len(set(place.values())) == len(place)
    assert sorted(pool.free) == [block for block, holders in enumerate(pool.refcount) if not holders]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_python_pool_does_what_the_model_does(page_size):
    shape = GroupShape(num_pages=120 // page_size, page_size=page_size, width=1000)
    random, copies = np.random.default_rng(page_size), 0
    pool, model = BlockPool(shape.num_pages, page_size, ROWS), Model((shape,), ROWS, max_epochs=16)
    for step in range(1500):
        wanted = (random.integers(0, 9, ROWS) * (random.random(ROWS) < 0.7)).tolist()
        granted, copied = pool.reserve(wanted)
        status, _ = model.reserve(wanted, BOUND, None)
        assert granted == [n if code == Status.OK else 0 for n, code in zip(wanted, status, strict=True)]
        copies += len(copied)
        pool.commit(granted)
        model.commit([[step] * n for n in granted])
        if step % 3 == 0:
            gone = (random.random(ROWS) < 0.3).tolist()
            pool.release(gone)
            model.release(gone, BOUND)
        elif step % 3 == 1:
            kept = [int(random.integers(0, length + 1)) for length in pool.length]
            pool.truncate(kept)
            model.truncate(kept, BOUND, [True] * ROWS)
        else:
            empty = [not length for length in pool.length]
            parent = [int(random.integers(0, ROWS)) if none else ROWS for none in empty]
            parent = [p if p < ROWS and pool.length[p] else ROWS for p in parent]
            pool.fork(parent)
            model.fork(parent, BOUND)
        model.advance(model.epoch)
        compare(pool, model)
    assert page_size == 1 or copies > 50
