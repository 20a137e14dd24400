"""A cache in a file: it decodes on as before, and nobody else's bytes are read."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.descriptor import DescriptorMismatch, Model, Positions, explain, weights_digest
from kvjax.descriptor.encoding import encode
from kvjax.saving import CacheFileError, container
from tests.descriptor.examples import single_changes
from tests.engine.serving import model
from tests.layout.serving import PROMPTS, decode_on, prefilled


def contract(**changes):
    """What the tiny model's caches promise, beside what a cache knows itself."""
    fields = {
        "model": Model("tiny", weights_digest(model().parameters)),
        "text": None,
        "adapter": None,
        "media": (),
        "rope": None,
        "positions": Positions("none"),
        "quantisation": (),
        "tenant": "somebody",
    }
    return fields | changes


def row_tokens():
    return [PROMPTS[0], (), PROMPTS[1], PROMPTS[2]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A cache in the midst of serving, its next tokens, its descriptor, and its file."""
    cache, tokens = prefilled()
    descriptor = kvjax.describe(cache, row_tokens(), **contract())
    path = tmp_path_factory.mktemp("saved") / "cache.kv"
    kvjax.save(cache, path, descriptor)
    return cache, tokens, descriptor, path


def test_a_loaded_cache_decodes_on_to_the_same_tokens(saved):
    cache, tokens, descriptor, path = saved
    loaded = kvjax.load(path, descriptor, backend="xla")
    assert kvjax.check_invariants(loaded.table) == []
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    for one, other in zip(jax.tree.leaves(loaded.table), jax.tree.leaves(cache.table), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(decode_on(loaded, tokens), decode_on(cache, tokens))


def test_pages_are_moved_in_runs(saved, tmp_path, monkeypatch):
    """More pages than one run holds, and a shorter last one."""
    cache, tokens, descriptor, _ = saved
    monkeypatch.setattr("kvjax.saving.cache_file.RUN_PAGES", 10)
    assert int(cache.table.groups[0].held) % 10 and int(cache.table.groups[0].held) > 20
    kvjax.save(cache, tmp_path / "runs.kv", descriptor)
    loaded = kvjax.load(tmp_path / "runs.kv", descriptor, backend="xla")
    np.testing.assert_array_equal(decode_on(loaded, tokens), decode_on(cache, tokens))


def test_only_live_pages_are_written(saved):
    cache, _, descriptor, path = saved
    held = int(cache.table.groups[0].held)
    bytes_a_page = cache.pool_bytes // 64
    table = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.table))
    assert held * bytes_a_page + table < path.stat().st_size < held * bytes_a_page + table + 4096
    loaded = kvjax.load(path, descriptor, backend="xla")
    free = np.flatnonzero(np.asarray(cache.table.groups[0].refcount) == 0)
    assert len(free) == 64 - held and not np.asarray(loaded.pools[0]["kv"])[free].any()


def test_a_file_without_a_pages_bytes_would_be_noticed(saved, monkeypatch):
    """The token check sees it when one live page comes back empty."""
    cache, tokens, descriptor, path = saved
    write = kvjax.saving.cache_file._write

    def forgetful(pool, num_pages, pages, images):
        return write(pool, num_pages, pages.at[0].set(num_pages), images)

    monkeypatch.setattr("kvjax.saving.cache_file._write", forgetful)
    loaded = kvjax.load(path, descriptor, backend="xla")
    assert (decode_on(loaded, tokens) != decode_on(cache, tokens)).any()


def test_every_difference_is_refused_and_named(saved):
    """Another model, weight version, RoPE, dtype, shard map, tenant, …: each field on its own."""
    *_, descriptor, path = saved
    changes = single_changes(descriptor)
    named = {place for place, _ in changes}
    assert {"model.name", "model.weights", "tenant", "positions.keys", "spec.groups[0].tensors[0].dtype"} <= named
    for place, changed in changes:
        with pytest.raises(DescriptorMismatch) as caught:
            kvjax.load(path, changed, backend="xla")
        assert [difference.field for difference in caught.value.differences] == [place]
        assert place in str(caught.value) and "cache.kv" in str(caught.value)


def test_a_part_one_side_lacks_is_named(saved):
    *_, descriptor, path = saved
    rope = kvjax.descriptor.Rope("default", 1e4, 8, False)
    shards = (kvjax.layout.Shard("head", "tensor", 2),)
    for place, value in (("rope", rope), ("shards", shards), ("text", kvjax.descriptor.Text("a", None))):
        with pytest.raises(DescriptorMismatch, match=f"does not match in {place}"):
            kvjax.load(path, replace(descriptor, **{place: value}), backend="xla")


def test_every_changed_byte_and_every_cut_is_refused(saved, tmp_path, monkeypatch):
    """Before any array is made."""
    *_, descriptor, path = saved
    monkeypatch.setattr("kvjax.saving.cache_file.init", lambda *_, **__: pytest.fail("an array was made"))
    data = path.read_bytes()
    broken = tmp_path / "broken.kv"
    places = [*range(64), *range(64, len(data), len(data) // 150), *range(len(data) - 40, len(data))]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        broken.write_bytes(changed)
        with pytest.raises(CacheFileError) as caught:
            kvjax.load(broken, descriptor)
        assert caught.value.field == ("magic" if place < 8 else "version" if place < 12 else caught.value.field)
        assert caught.value.field in ("magic", "version", "length", "checksum")
        assert str(broken) in str(caught.value)
    for length in (0, 5, 19, 20, 100, len(data) // 2, len(data) - 33, len(data) - 1):
        broken.write_bytes(data[:length])
        with pytest.raises(CacheFileError, match=r"magic|length|checksum"):
            kvjax.load(broken, descriptor)
    broken.write_bytes(data + b"\0")
    with pytest.raises(CacheFileError, match="checksum"):
        kvjax.load(broken, descriptor)
    with pytest.raises(CacheFileError, match="cannot be read"):
        kvjax.load(tmp_path / "none.kv", descriptor)
    with pytest.raises(CacheFileError, match="cannot be read"):
        kvjax.load(tmp_path, descriptor)


def test_a_file_with_a_right_checksum_and_wrong_contents_is_refused(saved, tmp_path):
    """As a faulty writer would leave: a part missing, a table that is not sound."""
    _, _, descriptor, path = saved
    read = container.read_container(path)
    forged = tmp_path / "forged.kv"

    def write(header=None, **changed):
        parts = {name: np.array(section) for name, section in read.sections.items()}
        for name, change in changed.items():
            parts[name] = change(parts[name])
        parts = {name: part for name, part in parts.items() if part is not None}
        sizes = {name: part.nbytes for name, part in parts.items()}
        container.write_container(forged, read.header if header is None else header, sizes, parts.values())

    write()
    kvjax.load(forged, descriptor, backend="xla")
    for change, message in (
        ({"pools[0].kv": lambda part: part[:-4]}, r"pools\[0\].kv"),
        ({"pools[0].kv": lambda _: None}, r"pools\[0\].kv"),
        ({"table.length": lambda _: None}, "table.length"),
        ({"table.length": lambda part: part + 1}, "is not sound"),
        ({"table.groups[0].refcount": lambda part: part * 0}, "is not sound"),
        ({"header": (b"nothing", ())}, "descriptor"),
        ({"header": ("only one",)}, "header"),
        ({"header": (descriptor.to_bytes(), ())}, "table"),
    ):
        write(**change)
        with pytest.raises(CacheFileError, match=message):
            kvjax.load(forged, descriptor, backend="xla")


def forge(path, sections, header, body):
    """A file of any header whose checksum is right."""
    encoded = encode((sections, header))
    data = container._START.pack(container.MAGIC, container.FILE_VERSION, len(encoded)) + encoded + body
    path.write_bytes(data + hashlib.sha256(data).digest())


def test_headers_that_lie_about_sizes_are_refused_before_any_array_is_made(saved, tmp_path, monkeypatch):
    """Shapes and lengths that overflow, run backwards or are no numbers; 2⁴⁰ by nothing fits a file of any length."""
    *_, descriptor, path = saved
    monkeypatch.setattr("kvjax.saving.cache_file.init", lambda *_, **__: pytest.fail("an array was made"))
    read = container.read_container(path)
    sections = {name: section.size for name, section in read.sections.items()}
    shapes = dict(read.header[1])
    body = b"".join(section.tobytes() for section in read.sections.values())
    forged = tmp_path / "forged.kv"

    def refused(sections, header, body=body):
        forge(forged, sections, header, body)
        with pytest.raises(CacheFileError) as caught:
            kvjax.load(forged, descriptor, backend="xla")
        assert caught.value.field == "header" or caught.value.field.startswith("table")

    for name in shapes:
        for shape in ((2**40, 0), (0, 2**40), (-1, -1), (2**63, 2), (1.0,), (True,), (1, 1, 1), 5, None, "ab"):
            empty = isinstance(shape, tuple) and 0 in shape  # then its section may be empty too
            sizes = sections | ({f"table{name}": 0} if empty else {})
            parts = [read.sections[section][:size].tobytes() for section, size in sizes.items()]
            refused(tuple(sizes.items()), (read.header[0], tuple((shapes | {name: shape}).items())), b"".join(parts))
    first, *rest = sections.items()
    for wrong in (
        ((first[0], -4), *rest, ("more", first[1] + 4)),
        ((first[0], float(first[1])), *rest),
        ((first[0], True), *rest, ("more", first[1] - 1)),
        ((5, first[1]), *rest),
        ((first[0], 0), first, *rest),
        (first[0], *rest),
        None,
        5,
    ):
        refused(wrong, read.header)


def test_rows_of_other_lengths_than_described_are_refused(saved, tmp_path):
    *_, descriptor, path = saved
    other = replace(descriptor, tokens=descriptor.tokens[::-1])
    read = container.read_container(path)
    sections = {name: section.size for name, section in read.sections.items()}
    body = b"".join(section.tobytes() for section in read.sections.values())
    forge(tmp_path / "forged.kv", tuple(sections.items()), (other.to_bytes(), read.header[1]), body)
    with pytest.raises(CacheFileError, match=r"table\.length: is \[26, 41, 22\]"):
        kvjax.load(tmp_path / "forged.kv", other, backend="xla")


def test_a_failed_save_leaves_what_was_there(saved, tmp_path, monkeypatch):
    cache, _, descriptor, _ = saved
    path = tmp_path / "cache.kv"
    path.write_bytes(b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("os.fsync", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(name, full)
            with pytest.raises(OSError, match="No space"):
                kvjax.save(cache, path, descriptor)
        assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["cache.kv"]
    kvjax.save(cache, path, descriptor)
    assert path.read_bytes() != b"before" and os.listdir(tmp_path) == ["cache.kv"]


def test_a_save_that_is_done_does_not_fail_afterwards(saved, tmp_path, monkeypatch):
    """In a directory that may be written to and not opened; and under the longest name that a file may have."""
    cache, _, descriptor, _ = saved
    path = tmp_path / ("x" * 255)

    opened = os.open

    def forbidden(name, *more, **options):
        if os.path.isdir(name):
            raise PermissionError(13, "Permission denied")
        return opened(name, *more, **options)

    monkeypatch.setattr("os.open", forbidden)
    kvjax.save(cache, path, descriptor)
    assert os.listdir(tmp_path) == [path.name]
    kvjax.load(path, descriptor, backend="xla")


def test_what_a_cache_is_not_is_not_saved(saved, tmp_path):
    cache, _, descriptor, _ = saved
    path = tmp_path / "cache.kv"
    other = replace(descriptor, spec=kvjax.CacheSpec.uniform(layers=2, kv_heads=2, head_dim=8))
    with pytest.raises(DescriptorMismatch, match=r"in spec.groups\[0\].tensors\[0\].dtype.*Nothing was written"):
        kvjax.save(cache, path, other)
    for field, value in (("order", "layer page head token lane"), ("byte_order", "big"), ("pages", ())):
        with pytest.raises(DescriptorMismatch, match=f"to be saved does not match in {field}"):
            kvjax.save(cache, path, replace(descriptor, **{field: value}))
    with pytest.raises(ValueError, match=r"rows of \[26, 41, 22\] tokens"):
        kvjax.save(cache, path, replace(descriptor, tokens=descriptor.tokens[:2]))
    group = cache.table.groups[0]
    unsound = replace(cache, table=replace(cache.table, groups=(replace(group, refcount=group.refcount + 1),)))
    with pytest.raises(ValueError, match="not sound and was not saved"):
        kvjax.save(unsound, path, descriptor)
    with pytest.raises(ValueError, match="rows hold"):
        kvjax.describe(cache, [PROMPTS[0]] * 4, **contract())
    with pytest.raises(TypeError, match="tenant"):
        kvjax.describe(cache, row_tokens(), **{k: v for k, v in contract().items() if k != "tenant"})
    assert not path.exists()


def half_served(cache):
    """Row 0 with nine tokens and two more reserved, two rows gone, and one page of each group pinned."""
    cache, _ = kvjax.reserve(cache, jnp.array([9, 6, 3]), max_tokens=32)
    cache = kvjax.commit(cache, jnp.array([9, 6, 3]))
    cache, _ = kvjax.pin(cache, [group.pages[2, :1] for group in cache.table.groups])
    cache, _ = kvjax.release(cache, jnp.array([False, True, True]), max_pages=16)
    return kvjax.reserve(cache, jnp.array([2, 0, 0]), max_tokens=4)[0]


def test_several_groups_pins_limbo_and_reservations_come_back(tmp_path):
    """All that a table may hold, in two groups of other page sizes, dtypes and side tensors, with NaN in the pools."""
    full = kvjax.GroupSpec("full", (0, 2), (kvjax.TensorSpec("k", 2, 8, "int8"), kvjax.TensorSpec("v", 2, 4, "int8"),
                                            kvjax.TensorSpec("scale", 2, 1, "float32")))  # fmt: skip
    other = kvjax.GroupSpec("other", (1,), (kvjax.TensorSpec("k", 1, 8), kvjax.TensorSpec("v", 1, 8)))
    spec = kvjax.CacheSpec((full, other))
    cache = kvjax.init(spec, rows=3, num_pages=(12, 20), page_size=(4, 2), max_context=17, max_epochs=4, backend="xla")
    cache = jax.jit(half_served)(cache)
    draw = np.random.default_rng(0)

    def noise(pool):
        bits = draw.integers(0, 255, (*pool.shape, pool.dtype.itemsize), np.uint8)
        return jnp.asarray(bits.view(pool.dtype)[..., 0])

    pools = tuple({name: noise(pool) for name, pool in group.items()} for group in cache.pools)
    cache = replace(cache, pools=pools)
    assert all(int(group.limbo) > 0 and int(group.pins.sum()) == 1 for group in cache.table.groups)
    descriptor = kvjax.describe(cache, [range(9), (), ()], **contract())
    path = tmp_path / "cache.kv"
    kvjax.save(cache, path, descriptor)
    loaded = kvjax.load(path, descriptor, backend="xla")
    assert kvjax.check_invariants(loaded.table) == [] and loaded.max_context == cache.max_context
    for one, two in zip(jax.tree.leaves(loaded.table), jax.tree.leaves(cache.table), strict=True):
        np.testing.assert_array_equal(one, two)
    for group, ours, theirs in zip(cache.table.groups, loaded.pools, cache.pools, strict=True):
        live = np.flatnonzero(np.asarray(group.refcount))
        assert len(live) > 1
        for name, pool in theirs.items():
            for first in range(0, pool.shape[0], group.num_pages):
                one, two = (np.asarray(array)[first + live].view(np.uint8) for array in (ours[name], pool))
                np.testing.assert_array_equal(one, two)


def test_extents_are_found_again_from_the_table(tmp_path):
    """Saved with extents and loaded with them, or without, or the other way round: the same pages in the same runs."""
    spec = kvjax.CacheSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    build = partial(kvjax.init, spec, rows=3, num_pages=21, page_size=2, max_context=16, backend="xla")
    options = kvjax.extents.ExtentOptions(span=1)
    cache = jax.jit(half_served)(build(extents=options))
    descriptor = kvjax.describe(cache, [range(9), (), ()], **contract())
    kvjax.save(cache, tmp_path / "extents.kv", descriptor)
    loaded = kvjax.load(tmp_path / "extents.kv", descriptor, backend="xla", extents=options)
    assert kvjax.extents.check_invariants(loaded.ownership) == [] and loaded.extents[0].runs.num_runs[0] > 1
    np.testing.assert_array_equal(loaded.extents[0].runs.counts, cache.extents[0].runs.counts)
    grown, _ = kvjax.reserve(loaded, jnp.array([0, 9, 0]), max_tokens=16)
    assert kvjax.extents.check_invariants(grown.ownership) == []

    plain = kvjax.load(tmp_path / "extents.kv", descriptor, backend="xla")
    assert plain.extents is None and kvjax.check_invariants(plain.table) == []
    with pytest.raises(ValueError, match=r"max_runs=1; pass ExtentOptions\(max_runs=2\)"):
        few = kvjax.extents.ExtentOptions(span=1, max_runs=1)
        kvjax.load(tmp_path / "extents.kv", descriptor, backend="xla", extents=few)


def test_an_empty_cache_can_be_saved(tmp_path):
    cache = kvjax.init(model().spec, rows=2, num_pages=4, page_size=4, max_context=8, backend="xla")
    descriptor = kvjax.describe(cache, [(), ()], **contract())
    kvjax.save(cache, tmp_path / "empty.kv", descriptor)
    loaded = kvjax.load(tmp_path / "empty.kv", descriptor, backend="xla")
    assert explain(kvjax.describe(loaded, [(), ()], **contract()), descriptor) == ()
    assert int(loaded.table.groups[0].free) == 4


SHARDED = """
import jax, numpy as np, pytest, sys
from dataclasses import replace
from functools import partial
from jax.sharding import AxisType
import kvjax
from kvjax.descriptor import DescriptorMismatch
from kvjax.layout import Shard
from tests.layout.serving import decode_on, prefilled
from tests.saving.test_saving import contract, row_tokens
path = sys.argv[1]
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
cache, tokens = prefilled(mesh)
descriptor = kvjax.describe(cache, row_tokens(), **contract())
assert descriptor.shards == (Shard("head", "tensor", 2),)
kvjax.save(cache, path, descriptor)
loaded = kvjax.load(path, descriptor, backend="xla", mesh=mesh)
assert [s.data.shape for s in loaded.pools[0]["kv"].addressable_shards] == [(128, 1, 4, 16)] * 2
assert loaded.table.length.sharding.is_fully_replicated
np.testing.assert_array_equal(decode_on(loaded, tokens), decode_on(cache, tokens))
for expected in (descriptor, replace(descriptor, shards=())):
    with pytest.raises(DescriptorMismatch, match="does not match in shards"):
        kvjax.load(path, expected, backend="xla")
print("loaded on two devices")
"""


def test_a_cache_over_two_devices_is_loaded_over_two_and_no_other_number(tmp_path):
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, "-c", SHARDED, str(tmp_path / "cache.kv")]
    done = subprocess.run(program, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "two devices" in done.stdout, done.stderr[-3000:]
