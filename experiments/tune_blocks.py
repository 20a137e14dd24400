"""Which block sizes are fastest here, for one shape? Times all that the rule allows and writes the best as plain data.

    python -m experiments.tune_blocks --json out/h200_32x8.json               # on a TPU or GPU: some minutes
    python -m experiments.tune_blocks --page 64 --heads 32:8x128 --rows 64 --context 8192 --json …
    python -m experiments.tune_blocks --dry_run                  # anywhere: candidates in interpreters, nothing timed

A cache takes the file by `kvjax.init(…, tuned=[kvjax.attention.load_tuned(path)])`, and a kernel called by itself by
`facts=pallas_kernels.tuned.with_tuned(facts, …)`; both refuse that of another chip.  Each candidate is held to float64
first (`decode_measure`), what does not compile or is wrong is never chosen, and times are those of `decode_sweep`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from absl import app, flags
from tqdm import tqdm

from experiments.decode_candidates import Candidate, kvjax_decode
from experiments.decode_cases import Batch, Heads, staggered
from experiments.decode_measure import DRY_RUN, JSON, measure
from experiments.decode_table import Record
from experiments.figures import write_figures
from kvjax.attention.paged import choose_backend
from pallas_kernels.hardware import H200, TPU_V6E, GpuFacts, TpuFacts
from pallas_kernels.tuned import AttentionShape, Tuned, as_record, with_tuned

HEADS = flags.DEFINE_string("heads", "32:8x128", "Query heads : KV heads × the width of both keys and values.")
PAGE = flags.DEFINE_integer("page", 16, "Page size.")
ROWS = flags.DEFINE_integer("rows", 64, "Rows, one query each.")
CONTEXT = flags.DEFINE_integer("context", 8_192, "Positions of the longest row.")


@dataclass(frozen=True)
class Chip:
    """A chip, and its kernel: (q, …, attention=, facts=) as `pallas_kernels` has it."""

    facts: TpuFacts | GpuFacts
    kernel: Any
    allowed_sizes: Any  # (shape, facts) to what the rule allows
    lane_multiple: int


def chip_of(facts: TpuFacts | GpuFacts, **options: Any) -> Chip:
    """The kernel and the rule of a chip; `options` go to the kernel."""
    if isinstance(facts, TpuFacts):
        from pallas_kernels.tpu import block_rule, paged_attention

        return Chip(facts, partial(paged_attention.paged_attention, **options), block_rule.allowed_sizes, 128)
    from pallas_kernels.gpu import block_rule as gpu_rule
    from pallas_kernels.gpu import paged_attention as on_gpu

    return Chip(facts, partial(on_gpu.paged_attention, **options), gpu_rule.allowed_sizes, 1)


def interpreted_chips() -> Iterator[Chip]:
    """A TPU and a GPU in their interpreters."""
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas import tpu as pltpu

    yield chip_of(TPU_V6E, interpret=pltpu.InterpretParams())
    # Each multiprocessor is a thread here.
    yield chip_of(replace(H200, multiprocessors=4), interpret=plgpu.InterpretGPUParams())


def decode_shape(heads: Heads, page_size: int) -> AttentionShape:
    """The shape of one decode step in bfloat16."""
    return AttentionShape(heads.kv, heads.q // heads.kv, heads.dim, heads.dim, page_size, "bfloat16", "bfloat16")


def candidates(chip: Chip, shape: AttentionShape) -> list[Tuned]:
    """Everything that the rule allows."""
    allowed = chip.allowed_sizes(shape, chip.facts)
    return [Tuned(chip.facts.name, shape, tuple(sizes.items())) for sizes in allowed]


def tried(chip: Chip, tuned: Tuned | None, heads: Heads, batch: Batch, page_size: int, *, timed: bool) -> Record:
    """How a candidate does; None is the rule's own choice."""
    facts = chip.facts if tuned is None else with_tuned(chip.facts, [tuned])
    name = "the rule" if tuned is None else " ".join(f"{name}={size}" for name, size in tuned.sizes)
    make = partial(kvjax_decode, partial(chip.kernel, facts=facts), chip.lane_multiple)
    record = measure(Candidate(name, make), batch, heads, page_size, timed=timed)
    return record | {"chip": facts.name, "sizes": None if tuned is None else dict(tuned.sizes)}


def best(records: Sequence[Record]) -> Record | None:
    """The fastest of those that are right and were timed; None if there is none."""
    return min((r for r in records if r["right"] and r["sizes"] and "seconds" in r), key=_seconds, default=None)


def _seconds(record: Record) -> float:
    return record["seconds"]


def line(record: Record) -> str:
    """A record as it is printed."""
    start = f"{record['chip']:6s} {record['kernel']:45s}"
    if "refused" in record:
        return f"{start} {record['refused']}"
    time = f" {record['seconds'] * 1e6:>9,.1f} µs" if "seconds" in record else ""
    return f"{start} error {record['error']:.1e}{'' if record['right'] else ' WRONG'}{time}"


def parse_heads(text: str) -> Heads:
    """32:8x128 as heads."""
    try:
        query, rest = text.split(":")
        return Heads(int(query), *map(int, rest.split("x")))
    except (TypeError, ValueError) as error:
        raise app.UsageError(f"--heads={text}; write it as 32:8x128") from error


def dry_run() -> int:
    """The first and last candidate of each chip on a tiny shape, for correctness alone; 1 if one is wrong."""
    heads, batch = Heads(2, 1, 64), staggered("2 × 150", 2, 150)
    print("dry run: a tiny shape, in interpreters; times would mean nothing, so none is taken and nothing is chosen")
    records = []
    for chip in interpreted_chips():
        all_of_them = candidates(chip, decode_shape(heads, 16))
        for tuned in (all_of_them[0], all_of_them[-1]):
            records.append(tried(chip, tuned, heads, batch, 16, timed=False))
            print(line(records[-1]), flush=True)
        print(f"{chip.facts.name:6s} {len(all_of_them)} candidates allowed by the rule")
    return 0 if all(record["right"] for record in records) else 1


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if DRY_RUN.value:
        return dry_run()
    device = jax.devices()[0]
    if device.platform == "cpu":
        raise app.UsageError("no accelerator here: run it on a TPU or GPU, or pass --dry_run for correctness alone")
    facts = choose_backend(device.platform, device.device_kind)
    assert facts != "xla", "only a CPU has no kernels"
    chip, heads = chip_of(facts), parse_heads(HEADS.value)
    shape, batch = (
        decode_shape(heads, PAGE.value),
        staggered(f"{ROWS.value} × {CONTEXT.value:,}", ROWS.value, CONTEXT.value),
    )
    records = []
    for tuned in tqdm([None, *candidates(chip, shape)], file=sys.stderr, disable=not sys.stderr.isatty()):
        records.append(tried(chip, tuned, heads, batch, PAGE.value, timed=True))
        print(line(records[-1]), flush=True)
    chosen = best(records)
    if chosen is None:
        print("nothing was right; nothing is chosen")
        return 1
    print(f"best: {chosen['kernel']}")
    if JSON.value:
        tuned = Tuned(facts.name, shape, tuple(chosen["sizes"].items()))
        write_figures(JSON.value, **as_record(tuned), batch=batch.name, records=records)
    return 0


if __name__ == "__main__":
    app.run(main)
