"""The TPU kernel keeps the contract under the TPU interpreter, and broken twins of it do not."""

import base64
import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import tpu as tpu_dialect
from jax.experimental.pallas import tpu as pltpu
from jaxlib.mlir import ir

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.hardware import TPU_V5P, TPU_V6E
from pallas_kernels.tpu import paged_attention as kernel
from pallas_kernels.tpu import slots
from pallas_kernels.tpu.page_stream import PageStream
from tests.kernels import contract

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
CASE = contract.CASES[0]


class RaceFoundError(Exception):
    """The interpreter saw a race."""


def run(case, *, facts=TPU_V6E, interpret=INTERPRET, pages_per_block=None):
    """Holds the kernel to the contract. Some versions of JAX raise when they see a race, others only print."""
    # Small blocks, so that a context takes several and a table slice ends inside a long row.
    pages_per_block = pages_per_block or 128 // case.page_size
    options = {"facts": facts, "interpret": interpret, "pages_per_block": pages_per_block}
    attention = jax.jit(partial(kernel.paged_attention, **options), static_argnames="attention")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            contract.run(attention, case, lane_multiple=128)
    except Exception as error:
        if "RACE DETECTED" in str(error):
            raise RaceFoundError from error
        raise
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    if "RACE DETECTED" in printed.getvalue():
        raise RaceFoundError(printed.getvalue())


@pytest.mark.parametrize("case", contract.CASES, ids=str)
def test_keeps_the_contract(case):
    run(case)


TWO_CORES = replace(INTERPRET, num_cores_or_threads=2)
CASES = {case.name: case for case in contract.CASES}


@pytest.mark.parametrize(
    "name",
    [
        "ragged-9:3x64-page16-bfloat16",
        "long-2:1x64-page16-bfloat16-window40-kept4",
        "chunks4-4:2x64-page16-bfloat16-all",
        "nothing",
    ],
)
def test_two_cores_share_the_blocks(name):
    run(CASES[name], facts=TPU_V5P, interpret=TWO_CORES)


LONG_ROW = replace(CASES["long-2:1x64-page16-bfloat16"], lengths=(700, 5), tiles=((1, 1, 5), (0, 1, 700), (1, 1, 3)))


@pytest.mark.parametrize("change", [{}, {"window": 500, "kept": 130}, {"sinks": True}], ids=str)
def test_two_cores_share_one_long_row(change):
    run(replace(LONG_ROW, **change), facts=TPU_V5P, interpret=TWO_CORES)


def test_float16_numbers_are_rebuilt_exactly():
    bits = jnp.arange(2**16, dtype=jnp.int32).astype(jnp.int16)
    rebuilt = slots._from_float16_bits(bits)
    np.testing.assert_array_equal(rebuilt, np.asarray(bits).view(np.float16).astype(np.float32))
