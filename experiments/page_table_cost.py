"""What a page-table step costs, and that it does not depend on the pool.

    python -m experiments.page_table_cost [--rows 256] [--pages 16384,4194304] [--json FILE]

A step is one decode step's ownership work: `reserve` one token for every row, `commit` it, `advance` the epoch.  It is
timed inside a `lax.scan` (no host in between) and dispatched one by one, with the table donated; medians over repeats,
compilation apart.  Rows start at staggered lengths, so that each step crosses page boundaries for 1 row in `page_size`.
Pool sizes take turns within each repeat, so that a change in the machine's load meets all of them.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from absl import app, flags

from kvjax import pages
from kvjax.pages import GroupShape, PageTable

ROWS = flags.DEFINE_list("rows", ["256", "1024"], "Row counts to measure.")
PAGES = flags.DEFINE_list("pages", [str(1 << 14), str(1 << 22)], "Pool sizes in pages, compared with one another.")
PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "Token positions a page.", lower_bound=1)
MAX_CONTEXT = flags.DEFINE_integer(
    "max_context",
    131072,
    "Positions a row may hold. XLA on CPU compiles a loop over small arrays into one function, about twice as fast; "
    "a table for contexts as short as the measurement is that small in small pools only.",
    lower_bound=1,
)
STEPS = flags.DEFINE_integer("steps", 200, "Steps in one timed scan.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 15, "Timed scans; the median is reported.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")


def step(table: PageTable, tokens: jax.Array) -> tuple[PageTable, jax.Array]:
    """One decode step's ownership work."""
    table, info = pages.reserve(table, tokens, max_tokens=tokens.shape[0])
    table, _ = pages.commit(table, info.tokens)
    table, _ = pages.advance(table, table.epoch)
    return table, info.status


def staggered_table(rows: int, num_pages: int, page_size: int, width: int) -> PageTable:
    """A table whose row r holds r % page_size + 1 tokens."""
    table = pages.make_page_table([GroupShape(num_pages, page_size, width)], rows=rows)
    tokens = jnp.arange(rows, dtype=jnp.int32) % page_size + 1
    table, info = jax.jit(pages.reserve, static_argnames="max_tokens")(table, tokens, max_tokens=rows * page_size)
    pages.raise_for_status(info.status, operation="staggering the rows")
    return pages.commit(table, tokens)[0]


class Subject:
    """One pool size, compiled and ready."""

    def __init__(self, rows: int, num_pages: int, page_size: int, width: int, steps: int) -> None:
        self.num_pages = num_pages
        self.steps = steps
        self.tokens = jnp.ones(rows, jnp.int32)
        self.start = staggered_table(rows, num_pages, page_size, width)
        self.scan = self._compile(lambda table, tokens: jax.lax.scan(lambda t, _: step(t, tokens), table, None, steps))
        self.single = self._compile(step)
        memory = self.scan.memory_analysis()
        if memory is None:
            raise RuntimeError("this backend tells nothing of a program's memory")
        self.memory = memory

    def _compile(self, function: Callable[..., Any]) -> jax.stages.Compiled:
        return jax.jit(function, donate_argnums=0).lower(self.start, self.tokens).compile()

    def time_scan(self) -> float:
        """Microseconds a step inside the scan."""
        table = self._fresh()
        start = time.perf_counter()
        table, status = jax.block_until_ready(self.scan(table, self.tokens))
        elapsed = time.perf_counter() - start
        pages.raise_for_status(status[-1], operation="a measured step")
        return elapsed / self.steps * 1e6

    def time_dispatched(self) -> float:
        """Microseconds a step when the host waits for each."""
        table = self._fresh()
        start = time.perf_counter()
        for _ in range(self.steps):
            table, status = jax.block_until_ready(self.single(table, self.tokens))
        elapsed = time.perf_counter() - start
        pages.raise_for_status(status, operation="a measured step")
        return elapsed / self.steps * 1e6

    def _fresh(self) -> PageTable:
        return jax.block_until_ready(jax.tree.map(jnp.copy, self.start))

    def audit(self) -> None:
        """What was timed must have left a sound table."""
        broken = pages.check_invariants(self.scan(self._fresh(), self.tokens)[0])
        if broken:
            raise RuntimeError(f"the table is unsound after the measured steps: {broken}")


def measure(
    rows: int, pools: Sequence[int], page_size: int, width: int, steps: int, repeats: int
) -> list[dict[str, Any]]:
    """One record a pool size."""
    subjects = [Subject(rows, num_pages, page_size, width, steps) for num_pages in pools]
    scans: list[list[float]] = [[] for _ in subjects]
    singles: list[list[float]] = [[] for _ in subjects]
    for repeat in range(repeats + 1):  # the first round warms up
        for index, subject in enumerate(subjects):
            scan, single = subject.time_scan(), subject.time_dispatched()
            if repeat:
                scans[index].append(scan)
                singles[index].append(single)
    records = []
    for subject, scan_times, single_times in zip(subjects, scans, singles, strict=True):
        subject.audit()
        records.append(
            {
                "rows": rows,
                "num_pages": subject.num_pages,
                "scan_us": statistics.median(scan_times),
                "scan_us_quartiles": statistics.quantiles(scan_times, n=4) if repeats > 1 else None,
                "dispatched_us": statistics.median(single_times),
                "temporary_bytes": subject.memory.temp_size_in_bytes,
                "alias_bytes": subject.memory.alias_size_in_bytes,
            }
        )
    return records


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    device = jax.devices()[0]
    print(f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    print(
        f"{'rows':>6} {'pages':>9} {'µs in scan':>11} {'µs dispatched':>14} {'temporaries':>12} {'× smallest pool':>16}"
    )
    records = []
    for rows in map(int, ROWS.value):
        width = -(-MAX_CONTEXT.value // PAGE_SIZE.value)
        group = measure(rows, [int(pool) for pool in PAGES.value], PAGE_SIZE.value, width, STEPS.value, REPEATS.value)
        for record in group:
            record["scan_ratio"] = record["scan_us"] / group[0]["scan_us"]
            record["dispatched_ratio"] = record["dispatched_us"] / group[0]["dispatched_us"]
            print(
                f"{rows:>6} {record['num_pages']:>9} {record['scan_us']:>11.1f} {record['dispatched_us']:>14.1f} "
                f"{record['temporary_bytes']:>12,} {record['scan_ratio']:>7.2f} {record['dispatched_ratio']:>8.2f}"
            )
        records += group
    if JSON.value:
        figures = {
            "device": device.device_kind,
            "machine": platform.machine(),
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "command": sys.argv,
            "page_size": PAGE_SIZE.value,
            "max_context": MAX_CONTEXT.value,
            "steps": STEPS.value,
            "repeats": REPEATS.value,
            "records": records,
        }
        with open(JSON.value, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    app.run(main)
