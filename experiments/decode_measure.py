"""One candidate on one batch: is it right, and how long does it take?  For the sweep and the tuner, and their flags."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.decode_candidates import Candidate, Decode
from experiments.decode_cases import Batch, Heads, made_up
from experiments.decode_table import Record
from experiments.device_time import Timing, time_in_turns

DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Tiny shapes on this CPU, in interpreters; correctness and no times.")
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")

TOLERANCE = 0.02  # of the largest value: bfloat16 rounds weights and results by 1/256 and averages over many


def error_of(decode: Decode, q: jax.Array, out: np.ndarray, batch: Batch, heads: Heads) -> float:
    """The largest difference to float64 over the largest value, on three rows and two KV heads of the first cache.

    NaN anywhere in the output gives NaN.
    """
    group = heads.q // heads.kv
    longest = int(np.argmax(batch.lengths))
    worst, largest = 0.0, 0.0
    for row in sorted({0, longest, batch.rows - 1}):
        for head in sorted({0, heads.kv - 1}):
            keys, values = (side.astype(np.float64) for side in decode.stored(0, row, head))
            queries = np.asarray(q[row, head * group : (head + 1) * group]).astype(np.float64)
            logits = queries @ keys.T * heads.dim**-0.5
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            expected = weights @ values / weights.sum(axis=1, keepdims=True)
            worst = max(worst, float(np.abs(out[row, head * group : (head + 1) * group] - expected).max()))
            largest = max(largest, float(np.abs(expected).max()))
    return worst / largest if np.isfinite(out).all() else float("nan")


def measure(candidate: Candidate, batch: Batch, heads: Heads, page_size: int, *, timed: bool) -> Record:
    """Checks a candidate and times it, or says why it cannot run."""
    record = start_record(candidate, batch, page_size) | {"heads": str(heads)}
    try:
        decode = candidate.make(batch, heads, page_size)
        q = made_up((batch.rows, heads.q, heads.dim), 99)
        out = np.asarray(jax.jit(decode.attend)(q, *decode.sets[0]).astype(jnp.float32))
        record["error"] = error_of(decode, q, out, batch, heads)
        record["right"] = record["error"] <= TOLERANCE  # False also for NaN
        if timed:
            record |= figures(time_in_turns(lambda q, *arrays: q + 1e-3 * decode.attend(q, *arrays), q, decode.sets))
    except Exception as error:  # whatever the device or compiler raises is what the table says
        said = str(error).strip().splitlines() or ["at " + traceback.format_exc().splitlines()[-2].strip()]
        return record | {"refused": f"{type(error).__name__}: {said[0]}"[:200]}
    return record


def start_record(candidate: Candidate, batch: Batch, page_size: int) -> Record:
    """What is known before a run."""
    return {
        "batch": batch.name,
        "page": page_size if candidate.paged else None,
        "kernel": candidate.name,
        "right": False,
        "left_out": False,
    }


def figures(timing: Timing) -> Record:
    """A timing as it is reported."""
    return {
        "seconds": timing.median,
        "fastest": timing.fastest,
        "slowest": timing.slowest,
        "compile_seconds": timing.compile_seconds,
    }
