"""A pool that went through a foreign layout holds the same tokens: decoding goes on as if nothing had happened."""

from dataclasses import replace

import numpy as np
import pytest

from kvjax.layout import LAYOUTS, layout_of, make_layout
from kvjax.storage import convert
from tests.engine.serving import expected
from tests.layout.serving import PROMPTS, decode_on, prefilled
from tests.margins import assert_equal_tokens, compare_tokens


def through(cache, name):
    """The cache with its pool converted to a layout and back."""
    group, table = cache.spec.groups[0], cache.table.groups[0]
    sizes = {"num_pages": table.num_pages, "page_size": table.page_size}
    own = layout_of(cache.layouts[0], layers=len(group.layers), num_pages=table.num_pages)
    foreign = make_layout(name, group, **sizes)
    there = convert(cache.pools[0], own, foreign)
    assert foreign == own or {n: a.shape for n, a in there.items()} != {n: a.shape for n, a in cache.pools[0].items()}
    return replace(cache, pools=(convert(there, foreign, own),))


def assert_decodes(cache, tokens, what):
    got = np.concatenate([tokens[:, None], decode_on(cache, tokens)], axis=1).tolist()
    pairs = [(run, *expected(prompt, len(run))) for run, prompt in zip(got, PROMPTS, strict=True)]
    assert_equal_tokens([compare_tokens(*pair) for pair in pairs], what)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_converted_pool_decodes_to_the_same_tokens(name):
    cache, tokens = prefilled()
    assert_decodes(through(cache, name), tokens, name)


def test_a_conversion_that_exchanges_two_axes_is_noticed():
    cache, tokens = prefilled()
    pool = cache.pools[0]["kv"]
    exchanged = pool.reshape(pool.shape[0], pool.shape[2], pool.shape[1], pool.shape[3]).swapaxes(1, 2)
    with pytest.raises(AssertionError, match="first wrong token"):
        assert_decodes(replace(cache, pools=({"kv": exchanged},)), tokens, "exchanged")
