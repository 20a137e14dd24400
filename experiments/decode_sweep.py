"""Paged decode on this accelerator: is it right, and what share of the memory's speed does it reach?

    python -m experiments.decode_sweep                          # on a TPU or GPU: a few minutes
    python -m experiments.decode_sweep --json out/sweep.json --plot out/sweep.png --seconds 540
    python -m experiments.decode_sweep --dry_run                # anywhere: tiny shapes, correctness alone, no times

One decode step of a layer, 32:8 heads of 128 in bfloat16, over batches of 64 × 8K, 8 × 32K, and one row of 256K among
63 of 1K against a balanced batch of as many positions; pages of 16, 64 and 128 in random order.  Beside this package's
kernel runs what JAX offers on the device: on TPU its ragged_paged_attention and paged_attention, on GPU its Triton
paged_attention, and cuDNN and XLA attention over a contiguous cache.  What cannot run says why.

How it measures.  Calls follow each other inside one program, each waiting for the one before, over two caches in turn,
so that nothing is left in a cache from the call before; a run takes about 50 ms and the median of 9 is shown, with the
fastest and slowest; compilation is apart.  "needed" is keys and values of all positions, each once; GB/s is needed over
time.  The device's own speed comes from the same run and as many bytes: read is a plain float32 sum, copy an array
rewritten (both its bytes counted).  What a kernel returns is compared, on rows picked here and there, with float64 on
the host: "error" is the largest difference over the largest value.  Positions past a length hold NaN and unused entries
of the page table hold 2³⁰ for this package's kernels, and harmless numbers for the others.

The program ends with 1 if this package's kernel is wrong anywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import jax
from absl import app, flags
from tqdm import tqdm

from experiments.decode_candidates import Candidate, candidates, interpreted
from experiments.decode_cases import Batch, Heads, one_long_row, staggered
from experiments.decode_measure import DRY_RUN, JSON, TOLERANCE, measure, start_record
from experiments.decode_table import Record, findings, lines, plot_shares
from experiments.device_time import copy_bandwidth, read_bandwidth
from experiments.figures import write_figures
from kvjax.attention.paged import choose_backend

PAGES = flags.DEFINE_list("pages", ["16", "64", "128"], "Page sizes.")
SECONDS = flags.DEFINE_float("seconds", 480, "Start nothing new after this long; what is left out says so.")
PEERS = flags.DEFINE_boolean("peers", True, "Also run what JAX offers.")
PLOT = flags.DEFINE_string("plot", None, "Also draw the shares of the read bandwidth, as a PNG.")


def workloads() -> tuple[Heads, list[Batch]]:
    """The heads and the batches."""
    if DRY_RUN.value:
        return Heads(4, 2, 128), [staggered("2 × 40", 2, 40), *one_long_row(3, 70, 9)]
    return Heads(32, 8, 128), [
        staggered("64 × 8,192", 64, 8_192),
        staggered("8 × 32,768", 8, 32_768),
        *one_long_row(64, 262_144, 1_024),
    ]


def shares(record: Record, needed_bytes: int, read: float, copy: float) -> Record:
    """Adds what the time says of bandwidth."""
    if "seconds" not in record:
        return record
    speed = needed_bytes / record["seconds"]
    return record | {
        "needed_bytes": needed_bytes,
        "bytes_per_second": speed,
        "share_of_read": speed / read,
        "share_of_copy": speed / copy,
    }


def sweep(who: list[Candidate], heads: Heads, batches: list[Batch], pages: list[int], *, timed: bool) -> list[Record]:
    """A record of every candidate for every batch and page size; this package's first, in case time runs out."""
    over = time.monotonic() + SECONDS.value
    # Candidates without pages run once a batch.
    plan = [
        (candidate, batch, page)
        for candidate in who
        for batch in batches
        for page in (pages if candidate.paged else pages[:1])
    ]
    bandwidths: dict[int, tuple[float, float]] = {}
    records = []
    for candidate, batch, page in tqdm(plan, unit="run", file=sys.stderr, disable=not sys.stderr.isatty()):
        if time.monotonic() > over:
            why = f"not run: the {SECONDS.value:.0f} seconds were over"
            records.append(start_record(candidate, batch, page) | {"left_out": True, "refused": why})
            continue
        record = measure(candidate, batch, heads, page, timed=timed)
        if timed:
            needed = batch.needed_bytes(heads)
            if needed not in bandwidths:
                bandwidths[needed] = read_bandwidth(needed), copy_bandwidth(needed)
            read, copy = bandwidths[needed]
            record = shares(record | {"read_bandwidth": read, "copy_bandwidth": copy}, needed, read, copy)
        records.append(record)
    return records


def accelerated(device: jax.Device) -> Iterator[Candidate]:
    """Who can be measured on a device. NotImplementedError for one without kernels."""
    return candidates(device.platform, choose_backend(device.platform, device.device_kind))


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    timed = not DRY_RUN.value
    device = jax.devices()[0]
    if timed and device.platform == "cpu":
        raise app.UsageError("no accelerator here: run it on a TPU or GPU, or pass --dry_run for correctness alone")
    who = list(accelerated(device) if timed else interpreted())
    if not PEERS.value:
        who = [candidate for candidate in who if candidate.name.startswith("kvjax")]
    pages = [int(page) for page in PAGES.value][: None if timed else 1]
    print(f"{device.device_kind}, jax {jax.__version__}")
    if not timed:
        print("dry run: tiny shapes, in interpreters; times would mean nothing and are not shown")

    heads, batches = workloads()
    records = sweep(who, heads, batches, pages, timed=timed)
    print(*lines(records, timed=timed), *findings(records, batches, device.device_kind), sep="\n")
    if JSON.value:
        write_figures(JSON.value, dry_run=not timed, tolerance=TOLERANCE, records=records)
    if PLOT.value and timed:
        plot_shares(PLOT.value, records, device.device_kind)
    ours = [record for record in records if record["kernel"].startswith("kvjax")]
    return 0 if all(record["right"] or record["left_out"] for record in ours) else 1


if __name__ == "__main__":
    app.run(main)
