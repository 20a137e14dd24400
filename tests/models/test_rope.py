"""Rotary embeddings: frequencies of every variant, both spellings of the config, and the rotation itself."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.rope import Rope, rope_from_config, rotate
from tests.models.decoding import FIXTURES

CASES = {case["name"]: case for case in json.loads((FIXTURES / "rope.json").read_text())["cases"]}


def build(config: dict) -> Rope:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return rope_from_config(config, head_dim, config["max_position_embeddings"])


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name):
    case = CASES[name]
    rope = build(case["config"])
    np.testing.assert_allclose(rope.frequencies, case["frequencies"], rtol=3e-7)  # two float32 roundings
    assert rope.magnitude == pytest.approx(case["magnitude"], rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_old_spelling_means_the_same(name):
    config = dict(CASES[name]["config"])
    fields = dict(config.pop("rope_parameters"))
    config |= {"rope_theta": fields.pop("rope_theta"), "rope_scaling": {**fields, "type": fields["rope_type"]}}
    del config["rope_scaling"]["rope_type"]
    assert build(config) == build(CASES[name]["config"])


def test_without_fields_the_base_is_ten_thousand():
    assert rope_from_config({}, 4, 16).frequencies == pytest.approx((1.0, 0.01))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "longrope"}, "'longrope' is not supported"),
        ({"rope_type": "linear"}, "'factor' is None"),
        ({"rope_type": "linear", "factor": "two"}, "'factor' is 'two'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "'low_freq_factor' is None"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "must be greater"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta=1.0 must be greater than 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, "one flat object"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        rope_from_config({"rope_parameters": fields}, 64, 2048)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="head_dim=5 must be even"):
        rope_from_config({}, 5, 16)


def test_rotation_is_a_complex_product():
    """Lanes (i, i + half) as one complex number, times e^(i · position · frequency), in float64."""
    generator = np.random.default_rng(0)
    x, position = generator.standard_normal((3, 2, 6)), np.array([0, 1, 700])
    rope = Rope((1.0, 0.1, 0.01), magnitude=1.5)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * position[:, None, None] * np.array(rope.frequencies)) * 1.5
    found = rotate(jnp.asarray(x, jnp.float32), rope.angles(jnp.asarray(position, jnp.int32)))
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=1e-3)
