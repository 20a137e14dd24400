"""What a step costs the host when sequences are virtually contiguous, and how much of the mapping is done ahead.

    python -m experiments.virtual_step_cost [--rows 256] [--steps 200] [--step_ms 10] [--page_group_bytes 65536]

Decode without a model: every row gets one token a step, and between steps the host sleeps for `--step_ms`, as it would
wait for a device.  Rows begin at staggered lengths.  Timed is `VirtualSpace.step` alone, everything it does on the
caller's thread; the first `--warm_up` steps are left out.  A stall is a step that had to map, or wait for a mapping.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from experiments.figures import write_figures

ROWS = flags.DEFINE_integer("rows", 256, "Sequences.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 200, "Timed steps.", lower_bound=2)
WARM_UP = flags.DEFINE_integer("warm_up", 20, "Steps before them.", lower_bound=0)
STEP_MS = flags.DEFINE_float("step_ms", 10.0, "Milliseconds that a step is given; 0 leaves no time to map ahead.")
CONTEXT = flags.DEFINE_integer("context", 64, "Tokens a row begins with, at least; at most 15 more.", lower_bound=1)
MAX_CONTEXT = flags.DEFINE_integer("max_context", 32768, "Tokens of address space a row.", lower_bound=512)
PAGE_GROUP_BYTES = flags.DEFINE_integer("page_group_bytes", 65536, "Bytes mapped at a time.", lower_bound=4096)
LOOKAHEAD = flags.DEFINE_integer("lookahead", 16, "Tokens mapped ahead of each row.", lower_bound=0)
LAYERS = flags.DEFINE_integer("layers", 8, "Layers of 2 KV heads × 64 in bfloat16.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    import kvjax
    from kvjax.virtual import VirtualSpace

    rows, tokens = ROWS.value, CONTEXT.value + 16 + WARM_UP.value + STEPS.value + 2 * LOOKAHEAD.value
    spec = kvjax.CacheSpec.uniform(layers=LAYERS.value, kv_heads=2, head_dim=64)
    page_tokens = max(1, PAGE_GROUP_BYTES.value // spec.bytes_per_token)
    space = VirtualSpace(
        spec,
        rows=rows,
        num_pages=rows * (tokens // page_tokens + 2),
        max_context=MAX_CONTEXT.value,
        page_group_bytes=PAGE_GROUP_BYTES.value,
        lookahead=LOOKAHEAD.value,
    )
    lengths = np.array([CONTEXT.value + index % 16 for index in range(rows)], np.int64)
    for _ in range(rows):
        space.admit(CONTEXT.value)
    times: list[float] = []
    before = space.figures()
    for step in range(-WARM_UP.value - 1, STEPS.value):
        if step == 0:
            space.settle()
            before = space.figures()
        start = time.perf_counter()
        status = space.step(lengths)
        spent = time.perf_counter() - start
        kvjax.raise_for_status(status, operation="a step")
        space.follow(None)
        space.commit()
        lengths += 1
        if step >= 0:
            times.append(spent * 1e6)
        time.sleep(STEP_MS.value / 1e3)
    space.settle()
    broken = space.check()
    if broken:
        raise RuntimeError(f"the space is unsound: {broken}")
    after = space.figures()
    counted = {
        name: getattr(after.counters, name) - getattr(before.counters, name)
        for name in ("steps", "stalls", "map_calls", "ahead_calls", "mapped_pages", "map_seconds", "ahead_seconds")
    }
    quartiles = statistics.quantiles(times, n=20)
    calls, seconds = counted["map_calls"], counted["map_seconds"]
    print(f"{rows} rows, {space.layout.page_tokens} tokens a page-group of {space.layout.page_bytes} bytes")
    print(f"step(): median {statistics.median(times):.0f} µs, 95 % {quartiles[18]:.0f} µs, most {max(times):.0f} µs")
    print(f"stalls: {counted['stalls']} of {counted['steps']} steps")
    ahead = counted["ahead_seconds"] / seconds if seconds else 0.0
    print(f"mapping: {calls} calls, {seconds / max(calls, 1) * 1e6:.0f} µs each, {ahead:.0%} of the time ahead of need")
    print(
        f"resident {after.resident_bytes >> 20} MiB, useful {after.useful_bytes >> 20} MiB, "
        f"reserved {after.reserved_bytes >> 30} GiB of addresses"
    )
    if JSON.value:
        used = (ROWS, STEPS, WARM_UP, STEP_MS, CONTEXT, MAX_CONTEXT, PAGE_GROUP_BYTES, LOOKAHEAD, LAYERS)
        sizes = {"resident": after.resident_bytes, "useful": after.useful_bytes, "reserved": after.reserved_bytes}
        write_figures(
            JSON.value, flags={flag.name: flag.value for flag in used}, step_us=times, counters=counted, bytes=sizes
        )
    space.close()


if __name__ == "__main__":
    app.run(main)
