"""Large tables, and arithmetic next to where 16 and 32 bits end, against Python's integers.

The table is real where it fits a test's memory (4 million pages and 1,024 rows of up to 1,048,576 positions take
0.4 GB); a pool past 2^31 elements and bytes is memory that the system has promised and nobody has touched.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import pages
from kvjax.packing import pack_rows
from kvjax.pages import GroupShape, Status
from kvjax.pages.table import pages_for
from kvjax.storage import gather_pages

EDGES = [edge + near for edge in (2**15, 2**16, 2**31) for near in (-2, -1, 0, 1, 2) if edge + near < 2**31]
NUM_PAGES, ROWS, PAGE_SIZE, CONTEXT = 1 << 22, 1024, 16, 1 << 20
PROFILE = settings(derandomize=True, database=None, deadline=None, max_examples=200)


def donating(name: str, **static: int):
    return jax.jit(lambda table, *arguments: getattr(pages, name)(table, *arguments, **static), donate_argnums=0)


def each_row(**values: int) -> np.ndarray:
    """Zeros, but for the rows named r0, r1, …"""
    rows = np.zeros(ROWS, np.int32)
    for name, value in values.items():
        rows[int(name[1:])] = value
    return rows


def test_every_transition_at_four_million_pages_and_a_million_positions_a_row():
    """One row of 1,048,576 tokens among 1,024, in a table that stays in its buffers; figures worked out by hand."""
    table = pages.make_page_table([GroupShape(NUM_PAGES, PAGE_SIZE, CONTEXT // PAGE_SIZE)], rows=ROWS)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(table) if leaf.size > ROWS}
    full = CONTEXT // PAGE_SIZE
    no_parent, last = np.full(ROWS, ROWS, np.int32), ROWS - 1

    def apply(name, table, *arguments, **static):
        table, info = donating(name, **static)(table, *arguments)
        return table, np.asarray(info.status)

    def held(table):
        return int(table.groups[0].held)

    tokens = each_row(**{"r0": 3, f"r{last}": CONTEXT})
    table, status = apply("reserve", table, tokens, max_tokens=CONTEXT + 8)
    assert (status == Status.OK).all() and held(table) == full + 1
    table, status = apply("commit", table, tokens)
    assert (status == Status.OK).all()
    table, status = apply("reserve", table, each_row(**{f"r{last}": 1}), max_tokens=ROWS)
    assert status[last] == Status.TABLE_FULL

    parent = no_parent.copy()
    parent[1], parent[2] = last, 0
    table, status = apply("fork", table, parent, max_pages=full + 1)
    assert (status == Status.OK).all() and held(table) == full + 1 and int(table.length[1]) == CONTEXT
    table, status = apply("truncate", table, np.where(np.arange(ROWS) == 1, CONTEXT - 5, table.length), max_pages=8)
    assert (status == Status.OK).all() and held(table) == full + 1
    table, status = apply("reserve", table, each_row(r1=5, r2=1), max_tokens=ROWS)  # both tails are shared
    assert (status == Status.OK).all() and held(table) == full + 3
    table, status = apply("commit", table, each_row(r1=5, r2=1))

    ids = np.asarray(table.groups[0].pages[last, -3:])
    table, info = donating("pin")(table, (jnp.asarray(ids),))
    assert (np.asarray(info.status[0]) == Status.OK).all()
    prefix = np.full((ROWS, 64), NUM_PAGES, np.int32)
    prefix[3] = np.asarray(table.groups[0].pages[last, :64])
    table, status = apply("adopt", table, (jnp.asarray(prefix),), each_row(r3=1000), max_pages=64)
    assert (status == Status.OK).all() and held(table) == full + 3 and int(table.groups[0].end[3]) == 63
    swapped = np.arange(ROWS, dtype=np.int32)
    swapped[[1, last]] = last, 1
    table, status = apply("reorder", table, swapped, max_pages=2 * full)
    assert (status == Status.OK).all() and held(table) == full + 3

    table, status = apply("release", table, np.arange(ROWS) == 1, max_pages=full)
    assert (status == Status.OK).all() and held(table) == full + 3  # the three pins hold its last pages
    table, _ = donating("unpin")(table, (jnp.asarray(ids),))
    assert held(table) == full + 2  # of those three, one had no other holder: the tail that row 1 wrote
    table, _ = donating("advance")(table, int(table.epoch))
    assert int(table.groups[0].free) == NUM_PAGES - full - 2
    assert pages.check_invariants(table) == []
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(table) if leaf.size > ROWS} == addresses


@pytest.mark.parametrize("page_size", [1, 2**15, 2**16])
def test_lengths_next_to_the_edges(page_size):
    """reserve, commit and truncate to lengths around 2^15, 2^16 and the longest that page table or integers allow."""
    width = min(2**16 + 8, (2**31 - 1) // page_size)
    longest = width * page_size
    table = pages.make_page_table([GroupShape(width, page_size, width)], rows=1)
    reserve, commit = donating("reserve", max_tokens=longest), donating("commit")
    predict = jax.jit(lambda table, tokens: pages.pages_needed(table, tokens, max_tokens=longest)[1])
    truncate, advance = donating("truncate", max_pages=width), donating("advance")
    lengths = [length for length in [*EDGES, longest - 1, longest] if length <= longest]
    for length, kept in zip(lengths, reversed(lengths), strict=True):
        table, info = reserve(table, jnp.array([length], jnp.int32))
        assert int(info.status[0]) == Status.OK, length
        table, _ = commit(table, info.tokens)
        assert (int(table.length[0]), int(table.groups[0].end[0])) == (length, -(-length // page_size))
        assert int(predict(table, jnp.array([longest - length + 1], jnp.int32))[0]) == Status.TABLE_FULL
        table, info = truncate(table, jnp.array([min(kept, length)], jnp.int32))
        assert int(table.groups[0].held) == -(-min(kept, length) // page_size)
        table, _ = truncate(table, jnp.array([0], jnp.int32))
        table, _ = advance(table, int(table.epoch))
    assert pages.check_invariants(table) == []


@PROFILE
@given(tokens=st.one_of(st.sampled_from(EDGES), st.integers(0, 2**31 - 1)), page_size=st.integers(1, 2**31 - 1))
def test_pages_for_any_count_of_tokens(tokens, page_size):
    assert int(pages_for(jnp.int32(tokens), page_size)) == -(-tokens // page_size)


@PROFILE
@given(st.integers(1, 2**29), st.integers(0, 2**30), st.integers(0, 2**29), st.integers(0, 2**29))
def test_ring_cursors_of_any_pool(num_pages, turn, free, limbo):
    """free, limbo and held for cursors anywhere in their range, up to the largest pool."""
    free %= num_pages + 1
    limbo %= num_pages - free + 1
    head = turn % (2 * num_pages)
    ready = (head + free) % (2 * num_pages)
    tail = (ready + limbo) % (2 * num_pages)
    group = pages.make_page_table([GroupShape(1, 1, 1)], rows=1).groups[0]
    # Sizes come from the shape of the refcounts: here one zero, repeated without memory.
    group = replace(group, refcount=np.broadcast_to(np.int32(0), (num_pages,)))
    group = replace(group, head=np.int32(head), ready=np.int32(ready), tail=np.int32(tail))
    assert (int(group.free), int(group.limbo), int(group.held)) == (free, limbo, num_pages - free - limbo)


@PROFILE
@given(st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_work_lists_name_every_pair_once_in_order(counts):
    row, index = pack_rows(jnp.array(counts, jnp.int32), 64)
    expected = [(r, i) for r, count in enumerate(counts) for i in range(count)]
    assert list(zip(row.tolist(), index.tolist(), strict=True)) == expected + [(7, 0)] * (64 - len(expected))


@pytest.mark.parametrize(
    ("rows", "call"),
    [
        (1024, lambda table: pages.reserve(table, jnp.zeros(1024, jnp.int32), max_tokens=2**21)),
        (1024, lambda table: pages.release(table, jnp.zeros(1024, bool), max_pages=2**21)),
    ],
)
def test_bounds_whose_counts_would_not_fit_are_refused_by_name(rows, call):
    table = pages.make_page_table([GroupShape(4, 4, 4)], rows=rows)
    with pytest.raises(ValueError, match=r"max_(tokens|pages)=2097152 × 1024 rows exceeds 32-bit counts"):
        call(table)


def test_page_ids_of_all_layers_fit_or_are_refused():
    """layer · pages + page is 32 bits up to 2^31 − 1 pages of all layers; nothing is allocated here."""
    build = lambda layers, number: kvjax.init(  # noqa: E731
        kvjax.CacheSpec.uniform(layers=layers, kv_heads=1, head_dim=8), rows=1, num_pages=number, max_context=64
    )
    largest = jax.eval_shape(lambda: build(7, (2**31 - 1) // 7))
    assert largest.pools[0]["kv"].shape[0] == 7 * ((2**31 - 1) // 7)
    with pytest.raises(ValueError, match=r"num_pages=306783379 × 7 layers exceeds 2147483647"):
        jax.eval_shape(lambda: build(7, (2**31 - 1) // 7 + 1))


def test_a_gather_past_two_to_the_31_elements_and_bytes():
    """The last pages of a pool of 2^31 + 16,384 elements: three pages of it are touched, and no more memory taken."""
    shape = ((1 << 20) + 8, 1, PAGE_SIZE, 128)
    memory = np.zeros(np.prod(shape) + 64, np.int8)  # JAX takes memory over as it is where it is aligned
    untouched = memory[-memory.ctypes.data % 64 :][: np.prod(shape)].reshape(shape)
    last = shape[0] - 1
    untouched[last], untouched[last - 1], untouched[0] = 3, 2, 1
    pool = jax.dlpack.from_dlpack(untouched)
    assert pool.size > 2**31 and pool.unsafe_buffer_pointer() == untouched.ctypes.data
    got = jax.jit(gather_pages)(pool, jnp.array([[last, 0], [last - 1, last]], jnp.int32))
    assert np.unique(got[0, 0, :PAGE_SIZE]).tolist() == [3] and np.unique(got[0, 0, PAGE_SIZE:]).tolist() == [1]
    assert np.unique(got[1, 0, :PAGE_SIZE]).tolist() == [2] and np.unique(got[1, 0, PAGE_SIZE:]).tolist() == [3]
