"""The decode sweep: its dry run is right, sees a wrong kernel, and its clock runs."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from experiments import decode_candidates, decode_cases, decode_sweep, decode_table, device_time


@pytest.fixture
def options():
    """The program's flags, as a command line would set them."""
    flags.FLAGS.unparse_flags()

    def parse(*arguments: str) -> None:
        flags.FLAGS(["decode_sweep", *arguments])

    yield parse
    flags.FLAGS.unparse_flags()


def test_the_dry_run_is_right_and_shows_no_times(options, capsys, tmp_path):
    file = tmp_path / "sweep.json"
    options("--dry_run", "--nopeers", f"--json={file}")
    assert decode_sweep.main(["decode_sweep"]) == 0
    said = capsys.readouterr().out
    assert "times would mean nothing" in said and "GB/s" not in said
    records = json.loads(file.read_text())["records"]
    assert {record["kernel"] for record in records} == {
        "kvjax, XLA",
        "kvjax, TPU interpreter",
        "kvjax, GPU interpreter",
    }
    assert all(record["right"] and "seconds" not in record for record in records)


HEADS = decode_cases.Heads(4, 2, 64)
BATCH = decode_cases.staggered("3 × 40", 3, 40)


def xla() -> decode_candidates.Candidate:
    return next(decode_candidates.interpreted())


def test_a_wrong_kernel_is_found():
    """One that sees a position too many meets the NaN there; one that leaves one out is off."""
    right = xla().make

    def wrong(change):
        def make(*arguments):
            decode = right(*arguments)
            pool, table, tiles, offset = decode.sets[0]
            return replace(decode, sets=((pool, table, replace(tiles, context=tiles.context + change), offset),))

        return decode_sweep.measure(replace(xla(), make=make), BATCH, HEADS, 16, timed=False)

    assert wrong(0)["right"]
    assert not wrong(+1)["right"] and np.isnan(wrong(+1)["error"])
    assert not wrong(-1)["right"]


def test_what_cannot_run_says_why():
    def make(*arguments):
        raise NotImplementedError("no such device")

    record = decode_sweep.measure(decode_candidates.Candidate("nobody", make), BATCH, HEADS, 16, timed=True)
    assert record["refused"] == "NotImplementedError: no such device" and not record["right"]


def test_the_timed_path_runs_and_reports_what_it_needs(monkeypatch):
    monkeypatch.setattr(device_time, "SECONDS_A_RUN", 1e-3)
    record = decode_sweep.measure(xla(), BATCH, HEADS, 16, timed=True)
    needed = BATCH.needed_bytes(HEADS)
    assert needed == (40 + 39 + 38) * 2 * 2 * 64 * 2
    record = decode_sweep.shares(record, needed, 1e9, 2e9)
    assert record["fastest"] <= record["seconds"] <= record["slowest"]
    assert record["share_of_read"] == 2 * record["share_of_copy"] > 0
    assert device_time.read_bandwidth(2**16) > 0 and device_time.copy_bandwidth(2**16) > 0
    assert "of read" in decode_table.lines([record], timed=True)[0]


def test_calls_take_turns_and_none_is_left_out():
    """The carry counts them: as many of one set of arrays as of the other."""
    seen = []

    def call(carry, step):
        jax.debug.callback(lambda step: seen.append(int(step)), step)
        return carry + step

    device_time.time_in_turns(call, jnp.int32(0), ((jnp.int32(1),), (jnp.int32(1000),)))
    jax.effects_barrier()
    assert seen.count(1) == seen.count(1000) > device_time.REPEATS


def test_pages_are_permuted_and_the_made_up_numbers_are_of_unit_variance():
    paging = decode_cases.permuted(BATCH, 16)
    used = np.concatenate([paging.of(row, length) for row, length in enumerate(BATCH.lengths)])
    assert sorted(used) == list(range(paging.num_pages)) != list(used)
    assert (paging.table == decode_cases.UNUSED_PAGE).sum() == paging.table.size - paging.num_pages
    values = np.asarray(decode_cases.made_up((7, 64, 64), 3, dtype="float32"))
    assert abs(values.mean()) < 0.02 and abs(values.var() - 1) < 0.02
    assert len(np.unique(values)) > 0.99 * values.size


def test_the_plot_is_drawn(tmp_path):
    record = {"batch": "8 × 32,768", "page": 16, "kernel": "kvjax", "share_of_read": 0.9}
    decode_table.plot_shares(str(tmp_path / "plot.png"), [record, record | {"kernel": "peer"}], "a device")
    assert (tmp_path / "plot.png").stat().st_size > 1000
