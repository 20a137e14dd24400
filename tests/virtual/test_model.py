"""A whole model over virtual memory: the same logits as over pages, to the last bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models import load
from kvjax.virtual import VirtualSpace
from tests.models.decoding import FIXTURES, make_cache


def test_a_model_gives_the_same_logits_as_over_pages():
    """Two rows share a prompt, prefilled and decoded greedily; on the virtual side the prompt is aliased."""
    model = load(FIXTURES / "tiny-llama").model
    space = VirtualSpace(model.spec, rows=2, num_pages=64, max_context=64, page_group_bytes=4096)
    paged = make_cache("paged", model, 2, 64)

    @jax.jit
    def step(parameters: Any, cache: Any, counts: Any, tokens: Any) -> tuple[Any, Any]:
        cache, grant = kvjax.reserve(cache, counts, max_tokens=len(tokens))
        hidden, cache = model.forward(parameters, cache, grant, tokens)
        return kvjax.commit(cache, grant.tokens), model.logits(parameters, hidden)

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.vocabulary, 24), jnp.int32)
    counts, lengths = np.array([20, 0], np.int32), np.array([20, 0])
    assert [space.admit(20), space.admit(20, shared=20)] == [0, 1]
    assert not space.step(lengths).any()
    _, got = step(model.parameters, space.cache(), counts, tokens)
    paged, expected = step(model.parameters, paged, counts, tokens)
    np.testing.assert_array_equal(np.asarray(got)[:20], np.asarray(expected)[:20])
    space.follow(got)
    space.commit()
    assert space.alias(0, 1, 20) == kvjax.Status.OK
    paged, status = kvjax.fork(paged, jnp.array([2, 0]), max_pages=8)
    kvjax.raise_for_status(status)
    ids = jnp.array([int(expected[19].argmax()), int(expected[19].argmin())], jnp.int32)
    lengths = np.array([20, 20])
    for _ in range(12):
        lengths = lengths + 1
        assert not space.step(lengths).any()
        _, got = step(model.parameters, space.cache(), np.ones(2, np.int32), ids)
        paged, expected = step(model.parameters, paged, np.ones(2, np.int32), ids)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
        space.follow(got)
        space.commit()
        ids = expected.argmax(-1).astype(jnp.int32)
    space.settle()
    assert space.check() == []
    space.close()
