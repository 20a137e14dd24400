"""A descriptor tells every two caches apart, and says why."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.descriptor import (
    Descriptor,
    DescriptorError,
    DescriptorMismatch,
    Model,
    Positions,
    Rope,
    Tokens,
    encode,
    explain,
    text_digest,
    token_digest,
    weights_digest,
)
from kvjax.descriptor.explain import MEANINGS
from kvjax.descriptor.schema import RECORDS
from kvjax.layout import Shard
from kvjax.spec import CacheSpec
from tests.descriptor.examples import ABSENT, EXAMPLE, LOCAL, single_changes, without


def test_every_single_change_has_another_digest_and_is_named():
    digests = {EXAMPLE.digest}
    changes = single_changes(EXAMPLE)
    for path, changed in changes:
        differences = explain(EXAMPLE, changed)
        assert [difference.field for difference in differences] == [path]
        assert differences[0].meaning and differences[0].first != differences[0].second
        assert explain(changed, EXAMPLE)[0].first == differences[0].second
        digests.add(changed.digest)
    assert len(digests) == len(changes) + 1 > 90


def test_a_part_that_is_absent_is_named():
    digests = {EXAMPLE.digest}
    for path in ABSENT:
        absent = without(EXAMPLE, path)
        assert [difference.field for difference in explain(EXAMPLE, absent)] == [path]
        digests.add(absent.digest)
    assert len(digests) == len(ABSENT) + 1


def test_every_field_has_a_meaning():
    expected = {f"{cls.__name__}.{field.name}" for cls in RECORDS.values() for field in fields(cls)}
    assert set(MEANINGS) == expected


def test_several_differences_come_in_order_and_make_one_message():
    other = replace(EXAMPLE, tenant="else", model=replace(EXAMPLE.model, weights="new"))
    differences = explain(EXAMPLE, other)
    assert [difference.field for difference in differences] == ["model.weights", "tenant"]
    message = str(DescriptorMismatch("the prefix", differences))
    assert "the prefix does not match in model.weights" in message and "the weights changed" in message
    assert "tenant: 'somebody' against 'else'" in message
    assert explain(EXAMPLE, replace(EXAMPLE)) == ()


def test_bytes_come_back_as_the_same_descriptor():
    for _, changed in single_changes(EXAMPLE):
        data = changed.to_bytes()
        try:
            assert Descriptor.from_bytes(data) == changed
        except DescriptorError:  # a spec or layout that no constructor lets pass
            assert explain(EXAMPLE, changed)[0].field.startswith(("spec", "rope.scaling", "shards[0].axis"))
    for path in ABSENT:
        assert Descriptor.from_bytes(without(EXAMPLE, path).to_bytes()) == without(EXAMPLE, path)


def test_the_serialisation_does_not_change_by_itself():
    """Files and peers depend on it: a change needs another DESCRIPTOR_VERSION.  The same in every process."""
    assert EXAMPLE.digest == GOLDEN
    program = "from tests.descriptor.examples import EXAMPLE; print(EXAMPLE.digest)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GOLDEN


GOLDEN = "96ef3fd417ab2237ed4fb3b9271995a528cba1af939698ed7d08b1fdf6853fd9"


def test_what_is_no_descriptor_of_this_version_is_refused():
    data = EXAMPLE.to_bytes()
    later = encode(("kvjax.Descriptor", 2, EXAMPLE))
    for wrong in (b"", data[:-1], data + b"\0", later, encode(("kvjax.Descriptor", 1)), encode(EXAMPLE)):
        with pytest.raises(DescriptorError, match="version 1"):
            Descriptor.from_bytes(wrong)
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with suppress(DescriptorError):
            assert Descriptor.from_bytes(bytes(changed)) != EXAMPLE


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(1, "w"), "Model.name=1 must be of type str"),
        (lambda: Model("m", None), "Model.weights=None"),
        (lambda: Tokens("d", True), "Tokens.computed=True must be of type int"),
        (lambda: Tokens("d", 1.0), "Tokens.computed=1.0"),
        (lambda: Positions("turned"), "Positions.keys='turned'"),
        (lambda: Rope("default", "1e4", 8, False), "Rope.theta='1e4'"),
        (lambda: Rope("default", 1e4, 8, False, (("b", 1.0), ("a", 1.0))), "must be sorted"),
        (lambda: Rope("default", 1e4, 8, False, [("a", 1.0)]), "Rope.scaling"),
        (lambda: Rope("default", 1e4, 8, False, (("a", 1.0), ("a", 2.0))), "name each parameter once"),
        # Equal to a valid value, and serialised as another.
        (lambda: replace(EXAMPLE, shards=(Shard("head", "tensor", 2.0),)), "Descriptor.shards"),
        (lambda: replace(EXAMPLE, shards=(Shard("lane", "tensor", 2),)), "Descriptor.shards"),
        (lambda: replace(EXAMPLE, pages=(replace(EXAMPLE.pages[0], page_size=16.0),)), "Descriptor.pages"),
        (lambda: replace(EXAMPLE, spec=CacheSpec((replace(LOCAL, layers=(0.0,)),))), "Descriptor.spec"),
        (lambda: replace(EXAMPLE, spec=CacheSpec((replace(LOCAL, layers=(False,)),))), "Descriptor.spec"),
        (lambda: replace(EXAMPLE, tenant=None), "Descriptor.tenant=None"),
        (lambda: replace(EXAMPLE, tokens=EXAMPLE.tokens[0]), "Descriptor.tokens"),
        (lambda: replace(EXAMPLE, media=EXAMPLE.tokens), "Descriptor.media"),
    ],
)
def test_a_field_of_another_type_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_whole_numbers_and_floats_are_one_rope():
    whole, real = (replace(EXAMPLE, rope=Rope("default", theta, 8, False)) for theta in (10000, 10000.0))
    assert whole == real and whole.digest == real.digest
    assert Rope("x", -0.0, 8, False) == Rope("x", 0.0, 8, False)
    assert (
        replace(EXAMPLE, rope=Rope("x", -0.0, 8, False)).digest == replace(EXAMPLE, rope=Rope("x", 0, 8, False)).digest
    )


def test_token_digests_tell_ids_and_order_but_not_types_apart():
    same = {token_digest(ids) for ids in ([1, 2, 300], np.array([1, 2, 300], np.int16), jnp.array([1, 2, 300]))}
    others = {token_digest(ids) for ids in ([2, 1, 300], [1, 2], [1, 2, 300, 0], [], [0], [1, 2, 301], [2**40])}
    assert len(same) == 1 and len(others) == 7 and not same & others
    for wrong in ([1.5], [[1, 2]], ["a"]):
        with pytest.raises(ValueError, match="pass one row of integers"):
            token_digest(wrong)


def test_a_weight_version_is_every_bit_name_shape_and_dtype():
    weights = {"layers": [jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)], "norm": jnp.zeros(4)}
    digest = weights_digest(weights)
    assert digest == weights_digest({"norm": np.zeros(4, np.float32), "layers": [np.asarray(weights["layers"][0])]})
    flipped = np.zeros(4, np.float32)
    flipped.view(np.uint8)[3] ^= 1
    changed = [
        {**weights, "norm": flipped},
        {**weights, "norm": jnp.zeros(4, jnp.int32)},
        {**weights, "norm": jnp.zeros((2, 2))},
        {"layers": weights["layers"], "scale": weights["norm"]},
        {**weights, "layers": [weights["layers"][0].reshape(3, 2)]},
        {**weights, "layers": [weights["layers"][0].T]},
        {"norm": weights["norm"]},
    ]
    assert len({digest, *map(weights_digest, changed)}) == 8
    assert len(digest) == len(EXAMPLE.digest) == len(text_digest("")) == 64


def test_arrays_on_the_device_digest_as_on_the_host():
    assert weights_digest(jnp.ones((3, 5))) == weights_digest(np.ones((3, 5), np.float32))
