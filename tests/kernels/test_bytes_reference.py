"""The plain jax.numpy forms keep the contract of moved bytes, and the checks notice those that do not."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import bytes_reference as reference
from pallas_kernels.quantise import quantise
from tests.kernels import bytes_contract as contract

PAGES = pytest.mark.parametrize(("shape", "dtype"), contract.PAGE_SHAPES, ids=str)


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_append_keeps_the_contract(case):
    contract.check_append(reference.append, case, lane_multiple=128)


@PAGES
def test_page_ops_keep_the_contract(shape, dtype):
    contract.check_copy(reference.copy_pages, shape, dtype)
    contract.check_gather(reference.gather_pages, shape, dtype)
    contract.check_write(reference.write_pages, shape, dtype)
    contract.check_scrub(reference.scrub_pages, shape, dtype)


def test_padding_that_is_not_zeroed_is_noticed():
    def append(pool, page, offset, tensors, *, scales):
        tokens = jnp.concatenate(tensors, axis=-1)
        return pool.at[page, :, offset, : tokens.shape[-1]].set(tokens, mode="drop"), scales

    contract.check_append(append, contract.Case(2, (64, 64), 16, "bfloat16", rows=((1, 3),)), lane_multiple=128)
    with pytest.raises(AssertionError, match=r"pool: .* elements differ"):
        contract.check_append(append, contract.Case(2, (80, 80), 16, "bfloat16", rows=((1, 3),)), lane_multiple=128)


def test_a_page_counted_from_the_end_is_noticed():
    def append(pool, page, offset, tensors, *, scales):
        return pool.at[page, :, offset].set(jnp.concatenate(tensors, axis=-1), mode="drop"), scales

    with pytest.raises(AssertionError, match=r"pool: .* elements differ"):
        contract.check_append(append, contract.PLAIN)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_to_nearest_even_for_every_value_and_every_tie(dtype):
    kind = contract.DTYPES[dtype]
    exact = np.sort(np.arange(256, dtype=np.uint8).view(kind).astype(np.float32))
    exact = exact[np.isfinite(exact)]
    ties = (exact[1:] + exact[:-1]) / 2
    around = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.float32([1e6, -1e6, np.inf, -np.inf])
    values = np.concatenate([exact, ties, *around, beyond])
    limits = ml_dtypes.finfo(kind)
    expected = np.clip(values, float(limits.min), float(limits.max)).astype(kind)
    got = quantise(jnp.asarray(values.reshape(-1, 1, 1)), jnp.float32(1), kind)
    contract.same_bits(got, expected.reshape(-1, 1, 1), "quantised")


def test_int8_rounds_ties_to_even_and_saturates():
    values = np.float32([0.5, 1.5, -0.5, -1.5, 126.5, 127.4, 300, -127.5, -128.6, 0]).reshape(-1, 1, 1)
    expected = np.int8([0, 2, 0, -2, 126, 127, 127, -128, -128, 0]).reshape(-1, 1, 1)
    contract.same_bits(quantise(jnp.asarray(values), jnp.float32(1), np.dtype("int8")), expected, "quantised")


def test_nan_stays_nan_in_float8():
    got = quantise(jnp.full((1, 1, 2), jnp.nan), jnp.float32(1), contract.DTYPES["float8_e4m3fn"])
    assert np.isnan(np.asarray(got, np.float32)).all()
