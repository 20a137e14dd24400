"""Bytes follow ownership: what attention returns is what a float64 softmax over each row's own tokens returns."""

from __future__ import annotations

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, GroupSpec, TensorSpec
from kvjax.attention import Scales
from kvjax.extents import ExtentOptions
from pallas_kernels.hardware import H200, TPU_V6E
from tests.cache_walk import DIM, KV_HEADS, LAYERS, Q_HEADS, ROWS, CacheWalk, K, Q, V
from tests.cache_walk import make_cache as make_cache_with

make_cache = partial(make_cache_with, side_tensor=False)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 60), (3, 24), (16, 9)])
def test_attention_sees_each_rows_own_tokens(page_size, num_pages):
    walk = CacheWalk(make_cache_with(page_size, num_pages), seed=page_size)
    walk.run(40)
    assert walk.checked > 300 and (page_size == 1 or walk.copies > 3)


def test_on_extents_too_and_while_pages_are_moved():
    walk = CacheWalk(make_cache_with(2, 36, extents=ExtentOptions(span=2)), seed=2)
    walk.run(40)
    assert walk.checked > 300 and walk.copies > 3 and walk.compactions > 1


def test_every_tensor_of_every_group_is_copied():
    """A shared tail is copied with its side tensors, in all layers, in groups of different page sizes."""
    spec = CacheSpec(
        (
            GroupSpec("attention", (0, 2), (TensorSpec("k", 2, 4, "float32"), TensorSpec("v", 2, 6, "float32"))),
            GroupSpec("indexed", (1,), (TensorSpec("c", 1, 8, "float32"), TensorSpec("scale", 1, 1, "float16"))),
        )
    )
    cache = kvjax.init(spec, rows=2, num_pages=(8, 12), page_size=(4, 3), max_context=12)
    assert [sorted(pools) for pools in cache.pools] == [["kv"], ["c", "scale"]]
    random = np.random.default_rng(0)

    def step(cache, tokens, marks):
        cache, grant = kvjax.reserve(cache, jnp.asarray(tokens, jnp.int32), max_tokens=8)
        for layer in range(3):
            names = {t.name: t for t in spec.groups[spec.locate(layer)[0]].tensors}
            values = {n: random.normal(size=(8, t.heads, t.width)).astype(t.dtype) for n, t in names.items()}
            marks.append((layer, np.asarray(grant.row), np.asarray(grant.position), values))
            cache = kvjax.write(cache, layer, grant, **{name: jnp.asarray(value) for name, value in values.items()})
        return kvjax.commit(cache, grant.tokens), grant

    marks: list = []
    cache, _ = step(cache, [5, 0], marks)
    cache, status = kvjax.fork(cache, jnp.array([2, 0], jnp.int32), max_pages=8)
    assert np.asarray(status).tolist() == [0, 0]
    cache, grant = step(cache, [0, 2], child := [])
    assert int(grant.copies) == 2 and kvjax.check_invariants(cache.table) == []
    for row, history in ((0, marks), (1, marks + child)):
        for layer, rows, positions, values in history:
            index, within = spec.locate(layer)
            group = cache.table.groups[index]
            for place in np.flatnonzero((rows == row) | (rows == 0)):
                page = int(group.pages[row, positions[place] // group.page_size]) + within * group.num_pages
                for pool in cache.layouts[index].pools:
                    slot = np.asarray(cache.pools[index][pool.name])[page, :, positions[place] % group.page_size]
                    for name, start, end in pool.slices:
                        np.testing.assert_array_equal(slot[:, start:end], values[name][place])


def test_a_scan_over_layers_and_steps_equals_single_calls():
    """A traced layer, and a whole multi-step loop with allocation inside, give what separate calls give."""
    cache = make_cache(3, 24)
    queries = jnp.asarray(Q[:, :ROWS])

    def step(cache, token):
        cache, grant = kvjax.reserve(cache, jnp.ones(ROWS, jnp.int32), max_tokens=ROWS)

        def layer(cache, index):
            k, v = (jnp.asarray(array)[index, token] for array in (K, V))
            cache = kvjax.write(cache, index, grant, k=k, v=v)
            return cache, kvjax.attend(cache, index, grant, queries[index])

        cache, out = jax.lax.scan(layer, cache, jnp.arange(LAYERS))
        return kvjax.commit(cache, grant.tokens), out

    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 4096, (7, ROWS)))
    looped, outs = jax.jit(lambda cache: jax.lax.scan(step, cache, tokens))(cache)
    for token, out in zip(tokens, outs, strict=True):
        cache, single = step(cache, token)
        np.testing.assert_allclose(out, single, atol=1e-5)
    chex.assert_trees_all_equal(cache.table, looped.table)


@pytest.fixture
def as_users_call(monkeypatch):
    """The shape checks of the tests stand aside: what is called meets the library's own."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("as_users_call")
def test_bad_arguments_name_the_value_and_the_repair():
    cache = make_cache(4, 8)
    spec = cache.spec
    _, grant = kvjax.reserve(cache, jnp.ones(ROWS, jnp.int32), max_tokens=ROWS)
    k = jnp.zeros((ROWS, KV_HEADS, DIM))
    cases = [
        (lambda: kvjax.init(spec, rows=0, num_pages=8, max_context=8), "rows=0"),
        (lambda: kvjax.init(spec, rows=1, num_pages=0, max_context=8), "num_pages=0"),
        (lambda: kvjax.init(spec, rows=1, num_pages=8, page_size=0, max_context=8), "page_size=0"),
        (lambda: kvjax.init(spec, rows=1, num_pages=8, max_context=0), "max_context=0"),
        (lambda: kvjax.init(spec, rows=1, num_pages=8, max_context=8, max_epochs=3), "power of two"),
        (lambda: kvjax.init(spec, rows=1, num_pages=(8, 8), max_context=8), "one for each of 1 groups"),
        (lambda: kvjax.init(spec, rows=1, num_pages=2**30, max_context=8), "page ids are 32 bits"),
        (lambda: kvjax.write(cache, 0, grant, k=k), "takes tensors"),
        (lambda: kvjax.write(cache, 0, grant, k=k, v=k[..., :3]), "takes tensors"),
        (lambda: kvjax.write(cache, 7, grant, k=k, v=k), "layer=7"),
        (lambda: kvjax.write(cache, ("window", 0), grant, k=k, v=k), "no group"),
        (lambda: kvjax.write(cache, ("attention", 5), grant, k=k, v=k), "layers 0…1"),
        (lambda: kvjax.write(cache, jnp.int32(5), grant, k=k, v=k), "layer=5"),
        (lambda: kvjax.write(cache, 1.7, grant, k=k, v=k), "layer=1.7"),
        (lambda: kvjax.attend(cache, 0, grant, k[:3]), r"packed=4"),
        (lambda: kvjax.attend(cache, 0, grant, k.astype(int)), "floats"),
        (lambda: kvjax.attend(make_cache(4, 8, rows=5), 0, grant, k), "grant is of 4 rows"),
        (lambda: kvjax.reserve(cache, [1, 2, 3], max_tokens=8), "tokens has shape"),
        (lambda: kvjax.reserve(cache, [0.5] * ROWS, max_tokens=8), "dtype float32"),
        (lambda: kvjax.commit(cache, 1), "one integer for each of 4 rows"),
        (lambda: kvjax.release(cache, [0, 1, 2, 3], max_pages=8), "mask"),
        (lambda: kvjax.release(cache, [True], max_pages=8), "mask"),
        (lambda: kvjax.fork(cache, jnp.int32(0), max_pages=8), "parent has shape"),
        (lambda: kvjax.fork(cache, [0] * ROWS, max_pages=0), "max_pages=0"),
        (lambda: kvjax.truncate(cache, [0] * ROWS, max_pages=8, rows=[1] * ROWS), "mask"),
        (lambda: kvjax.pin(cache, jnp.zeros(3, jnp.int32)), "tuple"),
        (lambda: kvjax.advance(cache, [0]), "one epoch number"),
        (lambda: kvjax.init(spec, rows=1, num_pages=8, max_context=8, backend="cuda"), "pallas_kernels.hardware"),
        (lambda: TensorSpec("layer", 1, 1), "keyword"),
        (lambda: TensorSpec("k", 1, 1, "float64"), "x64"),
        (lambda: TensorSpec("k", 1, 1, "complex64"), "real dtype"),
        (lambda: kvjax.attend(cache, 0, grant, jnp.zeros((ROWS, 3, DIM))), "multiple of"),
        (lambda: kvjax.attend(cache, 0, grant, jnp.zeros((ROWS, 2, DIM + 1))), "head dimension"),
        (lambda: kvjax.reserve(cache, jnp.ones(ROWS, jnp.int32), max_tokens=0), "max_tokens=0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="window"):
        kvjax.init(CacheSpec.uniform(layers=1, kv_heads=1, head_dim=4, window=8), rows=1, num_pages=8, max_context=8)


def shape_on(backend, page_size=16, **spec):
    """An abstract cache for a chip that is not here."""
    spec = CacheSpec.uniform(layers=1, kv_heads=1, **spec)
    make = partial(kvjax.init, spec, rows=1, num_pages=8, page_size=page_size, max_context=64, backend=backend)
    return jax.eval_shape(make)


@pytest.mark.parametrize(
    ("backends", "asked", "message"),
    [
        ((TPU_V6E, H200), {"head_dim": 72}, r"widths \(64, 80"),
        ((TPU_V6E, H200), {"head_dim": 64, "dtype": "int16"}, "in bfloat16, .*float8_e4m3fn"),
        ((TPU_V6E,), {"head_dim": 64, "dtype": "float16"}, "float16.*the kernels of v6e"),
        ((TPU_V6E, H200), {"head_dim": 64, "page_size": 8}, "page_size=8"),
    ],
)
def test_what_a_kernel_lacks_is_refused_before_there_is_a_cache(backends, asked, message):
    for backend in backends:
        with pytest.raises(NotImplementedError, match=message):
            shape_on(backend, **asked)


@pytest.mark.parametrize(
    "asked", [{"head_dim": 80}, {"head_dim": 256, "page_size": 128}, {"head_dim": 64, "dtype": "int8"}]
)
def test_what_the_kernels_take_is_not_refused(asked):
    for backend in (TPU_V6E, H200):
        shape_on(backend, **asked)
    shape_on(H200, head_dim=64, dtype="float16")


@pytest.mark.usefixtures("as_users_call")
def test_integers_of_any_width_mean_the_same():
    """Narrow ones do not overflow, wide ones do not change the dtypes of the state."""
    for dtype in ("int8", "uint8", "int64", "uint32"):
        cache, grant = kvjax.reserve(make_cache(4, 99), np.array([60, 60, 60, 60], dtype), max_tokens=100)
        assert np.asarray(grant.tokens).tolist() == [60, 0, 0, 0] and kvjax.check_invariants(cache.table) == []
        cache = kvjax.commit(cache, np.array([60, 0, 0, 0], dtype))
        assert np.asarray(cache.table.length).tolist() == [60, 0, 0, 0]
    cache = kvjax.commit(cache, np.array([2**32 - 1, 0, 0, 0], np.uint32))
    assert kvjax.Fault(int(cache.table.faults)) == kvjax.Fault.COMMIT_REFUSED


def test_a_grant_kept_past_its_release_writes_nothing():
    """Positions that are not the row's to write any more are dropped: a shared page stays as it was."""
    cache = make_cache(4, 8)
    k = jnp.ones((ROWS, KV_HEADS, DIM))
    cache, stale = kvjax.reserve(cache, jnp.array([3, 1, 0, 0], jnp.int32), max_tokens=ROWS)
    cache = kvjax.commit(kvjax.write(cache, 0, stale, k=k, v=k), stale.tokens)
    cache, _ = kvjax.release(cache, jnp.array([False, True, False, False]), max_pages=4)
    cache, _ = kvjax.fork(cache, jnp.array([4, 0, 4, 4], jnp.int32), max_pages=4)
    after = kvjax.write(cache, 0, stale, k=7 * k, v=7 * k)
    chex.assert_trees_all_equal(after.pools, cache.pools)


def attention_in_float64(q, k, v, scale, window=None, kept=0, soft_cap=None, sinks=None):
    """The answer of the last query over one row's k and v, [positions, heads, dim] each."""
    logits = scale * np.einsum("hgd,nhd->hgn", q.reshape(KV_HEADS, -1, DIM), k)
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    position = np.arange(len(k))
    unseen = (position < len(k) - (window or len(k))) & (position >= kept)
    weights = np.where(unseen, 0, np.exp(logits))
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks).reshape(KV_HEADS, -1, 1))
    return np.einsum("hgn,nhd->hgd", weights / total, v).reshape(Q_HEADS, DIM)


@pytest.mark.parametrize("kind", ["paged", "contiguous", "int8"])
@pytest.mark.parametrize(
    "masks", [{}, {"window": 5}, {"window": 3, "kept": 2}, {"soft_cap": 0.5}, {"sinks": True, "window": 150}], ids=str
)
def test_attend_masks_caps_and_sinks_as_asked(kind, masks):
    """Of a row of 140 tokens brought in two calls, every token is held to a float64 softmax."""
    random = np.random.default_rng(1)
    k, v = random.integers(-127, 128, (2, 140, KV_HEADS, DIM)) * 0.01
    q = random.normal(size=(140, Q_HEADS, DIM))
    options = {**masks, "sinks": random.normal(size=Q_HEADS)} if "sinks" in masks else masks
    spec = CacheSpec.uniform(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype="int8" if kind == "int8" else "float32")
    if kind == "contiguous":
        cache = kvjax.init_contiguous(spec, rows=2, max_context=150)
    else:
        cache = kvjax.init(spec, rows=2, num_pages=20, page_size=8, max_context=160)
    scale = 0.01 if kind == "int8" else 1.0
    scales = Scales(key=jnp.float32(scale), value=jnp.full(KV_HEADS, scale, jnp.float32)) if kind == "int8" else None
    done = 0
    for tokens in (137, 3):
        part = slice(done, done + tokens)
        stored = [np.rint(x[part] / scale) if kind == "int8" else x[part] for x in (k, v)]
        cache, grant = kvjax.reserve(cache, jnp.array([tokens, 0], jnp.int32), max_tokens=tokens)
        cache = kvjax.write(cache, 0, grant, k=jnp.asarray(stored[0]), v=jnp.asarray(stored[1]))
        out = kvjax.attend(cache, 0, grant, jnp.asarray(q[part], jnp.float32), scale=0.3, scales=scales, **options)
        cache = kvjax.commit(cache, grant.tokens)
        for index in range(0, tokens, 1 if tokens < 10 else 17):
            end = done + index + 1
            expected = attention_in_float64(q[end - 1], k[:end], v[:end], 0.3, **options)
            np.testing.assert_allclose(np.asarray(out)[index], expected, rtol=2e-5, atol=2e-6)
        done += tokens


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (KV_HEADS,)], ids=["one scale", "one a head"])
def test_what_is_written_with_scales_is_read_with_them(dtype, shape):
    """Attention is that of the numbers nearest to the tokens that the dtype can say at these scales, in float64."""
    random, dtype = np.random.default_rng(2), jnp.dtype(dtype)
    q = random.normal(size=(40, Q_HEADS, DIM)).astype(np.float32)
    k, v = random.normal(size=(2, 40, KV_HEADS, DIM)).astype(np.float32)
    spec = CacheSpec.uniform(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype.name)
    limits = (jnp.iinfo if dtype == np.int8 else jnp.finfo)(dtype)

    @jax.jit
    def step(scales):
        cache = kvjax.init(spec, rows=1, num_pages=8, page_size=8, max_context=64)
        cache, grant = kvjax.reserve(cache, jnp.array([40], jnp.int32), max_tokens=40)
        cache = kvjax.write(cache, 0, grant, scales=scales, k=jnp.asarray(k), v=jnp.asarray(v))
        return kvjax.attend(cache, 0, grant, jnp.asarray(q), scale=0.3, scales=scales)

    for largest in (4.0, 1.5):  # of the second, some tokens are beyond what can be said: they saturate
        key, value = (np.float32(largest * part / float(limits.max)) * np.ones(shape, np.float32) for part in (1, 0.7))
        if shape:
            key, value = key * [1, 1.25], value * [0.5, 1]
        key, value = key.astype(np.float32), value.astype(np.float32)
        out = np.asarray(step(Scales(key=jnp.asarray(key), value=jnp.asarray(value))))
        stored = []
        for tokens, scale in ((k, key), (v, value)):
            scale = np.broadcast_to(scale, KV_HEADS)[:, None]
            codes = np.clip(tokens / scale, float(limits.min), float(limits.max))
            codes = np.rint(codes) if dtype == np.int8 else codes
            stored.append(codes.astype(dtype).astype(np.float64) * scale)
        for index in range(0, 40, 13):
            expected = attention_in_float64(q[index], stored[0][: index + 1], stored[1][: index + 1], 0.3)
            np.testing.assert_allclose(out[index], expected, rtol=2e-5, atol=2e-6)
    assert step._cache_size() == 1, "a new scale compiled the step again"


@pytest.mark.usefixtures("as_users_call")
def test_scales_that_a_write_does_not_take_are_refused_by_name():
    def write(dtype, scales, tokens="float32", layers=kvjax.init):
        spec = CacheSpec.uniform(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
        sizes = {"num_pages": 4, "page_size": 4} if layers is kvjax.init else {}
        cache, grant = kvjax.reserve(layers(spec, rows=1, max_context=8, **sizes), jnp.ones(1, jnp.int32), max_tokens=1)
        k = jnp.ones((1, KV_HEADS, DIM), tokens)
        kvjax.write(cache, 0, grant, scales=Scales(key=scales, value=jnp.float32(1)), k=k, v=k)

    one = jnp.float32(1)
    with pytest.raises(ValueError, match=r"k is cached in bfloat16.*leave them out"):
        write("bfloat16", one)
    with pytest.raises(ValueError, match="k comes in int8; with scales pass bfloat16"):
        write("int8", one, tokens="int8")
    with pytest.raises(ValueError, match=r"scale.shape=\(3,\).*each of the 2 heads"):
        write("int8", jnp.ones(3))
    with pytest.raises(NotImplementedError, match=r"the scale of k.*no scales a token"):
        write("int8", jnp.ones((4, 8)))
    with pytest.raises(NotImplementedError, match="a contiguous cache is not quantised"):
        write("float32", one, layers=kvjax.init_contiguous)


def test_scales_belong_to_quantised_caches_and_only_to_them():
    one = Scales(key=jnp.float32(1), value=jnp.float32(1))
    for dtype, scales, message in (("int8", None, "int8 is read with scales"), ("float32", one, "leave them out")):
        spec = CacheSpec.uniform(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype)
        cache = kvjax.init(spec, rows=1, num_pages=4, page_size=4, max_context=8)
        cache, grant = kvjax.reserve(cache, jnp.array([1], jnp.int32), max_tokens=1)
        with pytest.raises(ValueError, match=message):
            kvjax.attend(cache, 0, grant, jnp.ones((1, Q_HEADS, DIM)), scales=scales)


def test_an_overcommit_changes_nothing_and_leaves_a_fault():
    cache = make_cache(4, 8)
    cache, _ = kvjax.reserve(cache, jnp.array([2, 0, 0, 0], jnp.int32), max_tokens=4)
    cache = kvjax.commit(cache, jnp.array([3, 0, 0, 0], jnp.int32))
    assert np.asarray(cache.table.length).tolist() == [0] * ROWS
    assert kvjax.Fault(int(cache.table.faults)) == kvjax.Fault.COMMIT_REFUSED


def test_refusals_raise_on_the_host_with_a_repair():
    cache = make_cache(4, 2)
    _, grant = kvjax.reserve(cache, jnp.array([4, 4, 4, 0], jnp.int32), max_tokens=16)
    with pytest.raises(kvjax.PageTableError, match=r"row 2: OUT_OF_PAGES.*more pages"):
        kvjax.raise_for_status(grant.status, operation="reserve")


SPEC = CacheSpec.uniform(layers=1, kv_heads=1, head_dim=64)


@pytest.mark.parametrize(("option", "repair"), [({"extents": True}, "ExtentOptions()"), ({"tuned": [1]}, "load_tuned")])
def test_options_of_another_kind_are_refused_by_name(option, repair):
    with pytest.raises(TypeError, match=re.escape(repair)):
        kvjax.init(SPEC, rows=1, num_pages=1, page_size=16, max_context=16, **option)
