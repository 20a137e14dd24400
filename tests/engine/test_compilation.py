"""Each step function is compiled once a bucket, and in place: the cache is aliased, nothing grows with the pool."""

from functools import partial

import chex
import jax
import pytest

from kvjax.engine import NoDrafts, Request, burst, steps
from kvjax.engine.batch import make_decode, make_slots
from kvjax.engine.sequence import Generation
from tests.engine.serving import PREFIX, make_engine, model, paged, serve

BUCKETS = {("mixed", 2), ("mixed", 4), ("burst", 1), ("burst", 2), ("fork", 256), ("release", 256)}


def many_shapes(monkeypatch, traces):
    """Serves prompts and companies of all sizes, twice, under a limit on traces a step function."""
    chex.clear_trace_counter()
    for module, name in ((steps, "mixed_step"), (burst, "decode_burst")):
        monkeypatch.setattr(module, name, chex.assert_max_traces(getattr(module, name), n=traces))
    engine = make_engine(paged(64, 16), max_seqs=2, chunk=4, burst=4, smallest_bucket=1)
    engine.add_prefix(PREFIX[:8])
    for _ in range(2):
        for company in (1, 2, 3, 5):
            serve(engine, [Request(PREFIX[: 2 + 4 * size], max_new_tokens=3 + size) for size in range(company)])
    return engine


def test_once_a_bucket(monkeypatch):
    engine = many_shapes(monkeypatch, traces=2)
    assert len(engine.compiled) == len(BUCKETS) and set(engine.compiled) == BUCKETS


def test_one_trace_too_many_is_noticed(monkeypatch):
    with pytest.raises(AssertionError, match="traced > 1 times"):
        many_shapes(monkeypatch, traces=1)


def compiled_burst(num_pages, *, donate=True):
    """A burst's memory for a pool of `num_pages` pages, and the bytes of its cache."""
    backing = paged(num_pages, 16)
    cache = jax.eval_shape(partial(backing.init, model().spec, 4))
    generation = Generation([1], order=0, group=0, row=0, request=Request((1,)), limit=4)
    slots = make_slots([generation], rows=4, number=4)
    decode = make_decode([generation], rows=4, number=4, steps=4, yield_early=False)
    function = partial(burst.decode_burst, model(), backing, NoDrafts(), 4, None)
    jitted = jax.jit(function, donate_argnames="cache" if donate else ())
    memory = jitted.lower(model().parameters, cache, decode, slots).compile().memory_analysis()
    return memory, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def test_a_burst_is_in_place():
    small, small_cache = compiled_burst(1 << 10)
    large, large_cache = compiled_burst(1 << 16)
    assert small.alias_size_in_bytes >= small_cache and large.alias_size_in_bytes >= large_cache
    assert large.temp_size_in_bytes - small.temp_size_in_bytes <= 4096 < large_cache - small_cache


def test_a_burst_that_is_not_in_place_is_noticed():
    memory, cache = compiled_burst(1 << 10, donate=False)
    assert memory.alias_size_in_bytes < cache


def test_the_pool_stays_where_it_is():
    engine = make_engine(paged(64, 16), burst=16)

    def address():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.cache.pools)]

    before = address()
    serve(engine, [Request((token,), max_new_tokens=30) for token in range(8)])
    assert address() == before and engine.metrics().bursts >= 4
