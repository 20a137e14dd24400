"""Predicted bytes against what is allocated: the pools and tables of `kvjax.init`, and an executable's own figure.

The first is a property over every spec that the runtime takes; the second is the demo model's largest step.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.architecture import read_architecture
from kvjax.capacity import ExecutableMemory, Ledger, Line, Parallelism, Step, Weights, cache_bytes, group_sizes
from kvjax.capacity.ledger import transient_line, weights_line
from kvjax.capacity.plan import KERNEL_PAGE_SIZES
from kvjax.engine import PagedBacking, steps
from kvjax.engine.batch import make_feed, make_slots
from kvjax.models.config import LlamaConfig
from kvjax.models.llama import LlamaModel, abstract_llama
from pallas_kernels.hardware import TPU_V6E
from tests.capacity.configs import config

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


@st.composite
def specs(draw) -> kvjax.CacheSpec:
    """Specs of one to three groups: K and V alone, of unequal widths, and with side tensors of other dtypes."""
    groups, first = [], 0
    for index in range(draw(st.integers(1, 3))):
        layers = draw(st.integers(1, 4))
        heads, key, value = (draw(st.integers(1, most)) for most in (8, 200, 200))
        dtype = draw(st.sampled_from(DTYPES))
        tensors = [kvjax.TensorSpec("k", heads, key, dtype), kvjax.TensorSpec("v", heads, value, dtype)]
        if draw(st.booleans()):
            tensors.append(kvjax.TensorSpec("scale", heads, draw(st.integers(1, 9)), draw(st.sampled_from(DTYPES))))
        if draw(st.booleans()):
            tensors = [kvjax.TensorSpec("latent", 1, key, dtype)]
        groups.append(kvjax.GroupSpec(f"g{index}", tuple(range(first, first + layers)), tuple(tensors)))
        first += layers
    return kvjax.CacheSpec(tuple(groups))


def held(tree) -> int:
    """Bytes of all arrays; of shapes as well as of buffers."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@settings(max_examples=60, deadline=None)
@given(specs(), st.data())
def test_predicted_bytes_are_what_init_allocates(spec, data):
    """Any spec, any sizes: the shapes of the arrays that `init` makes, traced and not filled."""
    rows, max_context = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 400))
    num_pages, page_size = (
        data.draw(st.lists(st.integers(1, 50), min_size=len(spec.groups), max_size=len(spec.groups))) for _ in range(2)
    )
    sizes = {"rows": rows, "num_pages": num_pages, "page_size": page_size, "max_context": max_context}
    cache = jax.eval_shape(lambda: kvjax.init(spec, **sizes, backend="xla"))
    predicted = cache_bytes(spec, **sizes)
    assert (predicted.pools, predicted.table) == (held(cache.pools), held(cache.table))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_predicted_bytes_are_what_init_allocates_on_tpu(data):
    """The specs that the kernels take, with lanes and tables padded to 128."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    spec = kvjax.CacheSpec.uniform(
        layers=pick(1, 2, 3),
        kv_heads=pick(1, 2, 8),
        head_dim=pick(64, 128),
        value_dim=pick(64, 128),
        dtype=pick("float32", "bfloat16"),
    )
    sizes = {
        "rows": pick(1, 7),
        "num_pages": [pick(1, 33)],
        "page_size": [pick(*KERNEL_PAGE_SIZES)],
        "max_context": pick(1, 100, 40000),
    }
    cache = jax.eval_shape(lambda: kvjax.init(spec, **sizes, backend=TPU_V6E))
    predicted = cache_bytes(spec, **sizes, lane_multiple=128)
    assert (predicted.pools, predicted.table) == (held(cache.pools), held(cache.table))


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2-7b", "qwen3-8b"])
def test_real_caches_take_the_predicted_bytes(name):
    """Buffers that exist: a small cache of a real model, against both the spec's and the config's prediction."""
    few = {**config(name), "num_hidden_layers": 2}
    spec = kvjax.CacheSpec.from_config(few)
    cache = kvjax.init(spec, rows=3, num_pages=7, page_size=16, max_context=100)
    predicted = cache_bytes(spec, rows=3, num_pages=[7], page_size=[16], max_context=100)
    assert predicted.pools == cache.pool_bytes and predicted.total == held(cache)
    (sizes,) = group_sizes(read_architecture(few).groups)
    assert 7 * sizes.page_bytes(16) == cache.pool_bytes
    assert spec.bytes_per_token == sizes.bytes_per_token


def test_the_demo_model_s_peak_is_predicted():
    """SmolLM2's largest step: weights, cache and transient of the ledger within 5 % of the executable's own figure."""
    config = LlamaConfig.from_huggingface(SMOLLM2)
    abstract = nnx.state(abstract_llama(config, "float32"))
    parameters = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    model = LlamaModel(config, "float32", parameters)
    rows, chunk, pages = 8, 64, 256
    backing = PagedBacking(pages, 16, 2048)
    cache = jax.eval_shape(lambda: backing.init(model.spec, rows))
    arguments = (
        model.parameters,
        cache,
        make_feed([], rows=rows, bucket=chunk),
        make_slots([], rows=rows, number=rows),
    )
    step = jax.jit(partial(steps.mixed_step, model, backing), donate_argnames="cache")
    measured = ExecutableMemory.of(step.lower(*arguments).compile())

    smollm2 = read_architecture(SMOLLM2)
    weights = weights_line(Weights(smollm2.parameters * 4, smollm2.parameters, "fp32", ""), 30, Parallelism())
    pools = cache_bytes(model.spec, rows=rows, num_pages=[pages], page_size=[16], max_context=2048).total
    work = transient_line(smollm2, Step(chunk, rows, element_bytes=4, scanned=True), Parallelism(), weights.bytes)
    ledger = Ledger((weights, Line("cache", pools, "", ""), work))
    assert measured.arguments == pytest.approx(weights.bytes + pools, rel=1e-4)
    assert ledger.total == pytest.approx(measured.peak, rel=0.05)
    # The transient alone is a model, and no worse than a half.
    assert work.bytes == pytest.approx(measured.temporaries, rel=0.5)


SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def test_measured_figures_replace_predicted_ones():
    compiled = jax.jit(lambda x: np.float32(2) * x).lower(np.ones(1024, np.float32)).compile()
    memory = ExecutableMemory.of(compiled)
    assert (memory.arguments, memory.outputs, memory.aliased) == (4096, 4096, 0)
    transient, executable = memory.lines()
    assert transient.bytes == memory.temporaries + 4096 and executable.bytes == memory.code
    assert "memory_analysis" in transient.source

    class Silent:
        def memory_analysis(self):
            return None

    with pytest.raises(ValueError, match="no memory analysis"):
        ExecutableMemory.of(Silent())


def test_the_fixture_of_the_demo_model_counts_its_weights():
    assert read_architecture(SMOLLM2).parameters == 134_515_008
