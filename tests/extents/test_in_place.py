"""Every transition of extents changes its state in place: temporaries do not grow with the pool or the page table."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from kvjax import extents as E
from tests.compile.in_place import LARGE, NARROW, PAGE_SIZE, ROWS, SLACK_BYTES, SMALL, WIDE, compile_on_cpu

MAX_PAGES, MAX_RUNS, SPAN = 512, 64, 32
PER_ROW, MASK = (jax.ShapeDtypeStruct((ROWS,), dtype) for dtype in ("int32", "bool"))
IDS = jax.ShapeDtypeStruct((16,), "int32")
MOVES = E.Moves(*(jax.ShapeDtypeStruct((size,), "int32") for size in (64, 64, 128, 128, 128)))


def lifecycle(extents, tokens, mask):
    """Steps of a server in a loop: rows grow, fork, roll back and leave, and pages come back."""

    def step(extents, _):
        extents, info = E.reserve(extents, tokens, max_tokens=2 * ROWS)
        extents, _ = E.commit(extents, info.tokens)
        extents, _ = E.fork(extents, tokens, max_pages=MAX_PAGES)
        extents, _ = E.truncate(extents, extents.table.length // 2, max_pages=MAX_PAGES)
        extents, _ = E.release(extents, mask, max_pages=MAX_PAGES)
        extents, _ = E.advance(extents, extents.table.epoch)
        return extents, info.status

    return lax.scan(step, extents, None, length=8)


CASES = {
    "reserve, prefill": (partial(E.reserve, max_tokens=4096), PER_ROW),
    "reorder": (partial(E.reorder, max_pages=MAX_PAGES), PER_ROW),
    "adopt": (partial(E.adopt, max_pages=MAX_PAGES), (jax.ShapeDtypeStruct((ROWS, 32), "int32"),), PER_ROW),
    "pin and unpin": (lambda extents, ids: E.unpin(E.pin(extents, ids)[0], ids), (IDS,)),
    "compact": (partial(E.compact, max_pages=MAX_PAGES), MOVES),
    "scan of lifecycles": (lifecycle, PER_ROW, MASK),
}


def memory(function, arguments, num_pages, positions):
    """(bytes of the state, bytes aliased, bytes of temporaries)."""
    shape = E.ExtentShape(num_pages, PAGE_SIZE, positions // PAGE_SIZE, max_runs=MAX_RUNS, span=SPAN)
    extents = jax.eval_shape(lambda: E.make_extent_table([shape], rows=ROWS))
    used = compile_on_cpu(function, extents, *arguments, donate=(0,)).memory_analysis()
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(extents))
    return whole, used.alias_size_in_bytes, used.temp_size_in_bytes


def in_place(function, *arguments):
    small, large = (memory(function, arguments, *size) for size in ((SMALL, NARROW), (LARGE, WIDE)))
    return small[1] >= small[0] and large[1] >= large[0] and large[2] - small[2] <= SLACK_BYTES


@pytest.mark.parametrize("name", CASES)
def test_a_transition_is_in_place(name):
    function, *arguments = CASES[name]
    assert in_place(function, *arguments)


def test_a_step_that_looks_back_is_noticed():
    def looks_back(extents, tokens):
        after, _ = E.reserve(extents, tokens, max_tokens=ROWS)
        return after, extents.extents[0].place[after.extents[0].place[:ROWS] + jnp.arange(ROWS)]

    assert not in_place(looks_back, PER_ROW)
