"""What ownership costs: the page table beside a pure-Python block pool doing the same work, for several pool sizes.

    python -m experiments.page_table_cost [--rows 16,64,256,1024] [--pages 16384,262144,4194304] [--clock cpu]

Three workloads, each leaving the table as large as it found it or growing as a decode does:

    decode     every row gets one token                          reserve, commit, advance
    speculate  every row gets four tokens and loses three        reserve, commit, truncate, advance
    branch     half the rows fork from the others, and go again  fork, release, advance

Each is timed as steps inside one `lax.scan` (no host in between) and as calls dispatched one by one, with the table
donated; then call by call.  Medians over repeats, compilation apart.  Rows start at staggered lengths, so that each
decode step crosses a page boundary for one row in `page_size`.  Pool sizes take turns within each repeat, so that a
change in the machine's load meets all of them.  The process stays on one core: Python uses no other, and XLA loses more
than it gains by spreading such small operations over threads (`--one_core=false` shows it).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from experiments.figures import write_figures
from experiments.python_pool import BlockPool

ROWS = flags.DEFINE_list("rows", ["16", "64", "256", "1024"], "Row counts to measure.")
PAGES = flags.DEFINE_list("pages", [str(1 << n) for n in (14, 18, 22)], "Pool sizes in pages.")
PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "Token positions a page.", lower_bound=4)
CONTEXT = flags.DEFINE_integer("context", 96, "Tokens each row begins with, staggered by up to a page.", lower_bound=4)
MAX_CONTEXT = flags.DEFINE_integer("max_context", 131072, "Positions a row may hold.", lower_bound=256)
STEPS = flags.DEFINE_integer("steps", 64, "Steps in one timed scan.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed runs; the median is reported.", lower_bound=1)
CLOCK = flags.DEFINE_enum(
    "clock",
    "wall",
    ["wall", "cpu"],
    "Time that passed, or the process's own: fair to both where others share the core.",
)
ONE_CORE = flags.DEFINE_boolean("one_core", True, "Keep the process on one core.")
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")

DRAFTS = 4
"""Tokens a row of `speculate` is given in a step; all but one are taken back."""

Record = dict[str, Any]


def clock() -> float:
    """Seconds on the chosen clock."""
    return time.perf_counter() if CLOCK.value == "wall" else time.process_time()


def staggered(rows: int) -> list[int]:
    """The lengths that rows begin with."""
    return [CONTEXT.value + row % PAGE_SIZE.value for row in range(rows)]


def children(rows: int) -> list[int]:
    """The parent of each row of the second half; `rows` (none) for the first."""
    return [rows] * (rows - rows // 2) + list(range(rows // 2))


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    start = clock()
    call()
    return (clock() - start) * 1e6


def measure_python(rows: int, num_pages: int) -> dict[str, float]:
    """Microseconds of each workload's step, and of each call, for the Python pool."""
    ones, drafts = [1] * rows, [DRAFTS] * rows
    parent, gone = children(rows), [p < rows for p in children(rows)]
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    for repeat in range(REPEATS.value + 1):  # the first round warms up
        for workload in ("decode", "speculate", "branch"):
            pool = BlockPool(num_pages, PAGE_SIZE.value, rows)
            pool.commit(pool.reserve(staggered(rows))[0])
            if workload == "branch":
                pool.release(gone)

            def decode(pool: BlockPool = pool) -> None:
                pool.commit(pool.reserve(ones)[0])

            def draft(pool: BlockPool = pool) -> None:
                pool.commit(pool.reserve(drafts)[0])

            def truncate(pool: BlockPool = pool) -> None:
                pool.truncate([n - DRAFTS + 1 for n in pool.length])

            def fork(pool: BlockPool = pool) -> None:
                pool.fork(parent)

            def release(pool: BlockPool = pool) -> None:
                pool.release(gone)

            steps: dict[str, list[tuple[str, Callable[[], None]]]] = {
                "decode": [("reserve + commit", decode)],
                "speculate": [
                    ("reserve 4 + commit", draft),
                    ("truncate", truncate),
                ],
                "branch": [
                    ("fork", fork),
                    ("release", release),
                ],
            }
            parts = [0.0] * len(steps[workload])
            for _ in range(STEPS.value):
                for index, (_, call) in enumerate(steps[workload]):
                    parts[index] += timed(call)
            if repeat:
                note(workload, sum(parts) / STEPS.value)
                for (name, _), part in zip(steps[workload], parts, strict=True):
                    note(name, part / STEPS.value)
    return {name: statistics.median(values) for name, values in times.items()}


class Subject:
    """The page table at one pool size: workloads compiled and ready."""

    def __init__(self, rows: int, num_pages: int) -> None:
        import jax
        import jax.numpy as jnp

        from kvjax import pages

        self.jax, self.pages, self.num_pages, self.rows = jax, pages, num_pages, rows
        self.times: dict[str, list[float]] = {}
        width = -(-MAX_CONTEXT.value // PAGE_SIZE.value)
        # The bucket, a power of two, that holds what half the rows share or give up.
        bound = 1 << (rows // 2 * -(-max(staggered(rows)) // PAGE_SIZE.value) - 1).bit_length()
        parent = jnp.array(children(rows), jnp.int32)

        def advance(table: Any) -> Any:
            return pages.advance(table, table.epoch)[0]

        def grow(tokens: int, table: Any) -> tuple[Any, Any]:
            wanted = jnp.full(rows, tokens, jnp.int32)
            table, info = pages.reserve(table, wanted, max_tokens=rows * tokens)
            return pages.commit(table, info.tokens)[0], info.status

        def truncate(table: Any) -> tuple[Any, Any]:
            table, info = pages.truncate(table, table.length - (DRAFTS - 1), max_pages=2 * rows)
            return advance(table), info.status

        def decode(table: Any) -> tuple[Any, Any]:
            table, status = grow(1, table)
            return advance(table), status

        def fork(table: Any) -> tuple[Any, Any]:
            table, info = pages.fork(table, parent, max_pages=bound)
            return table, info.status

        def release(table: Any) -> tuple[Any, Any]:
            table, info = pages.release(table, parent < rows, max_pages=bound)
            return advance(table), info.status

        self.parts: dict[str, list[tuple[str, Any]]] = {
            "decode": [("reserve + commit", decode)],
            "speculate": [("reserve 4 + commit", lambda table: grow(DRAFTS, table)), ("truncate", truncate)],
            "branch": [("fork", fork), ("release", release)],
        }
        table = pages.make_page_table([pages.GroupShape(num_pages, PAGE_SIZE.value, width)], rows=rows)
        lengths = jnp.array(staggered(rows), jnp.int32)
        full, info = jax.jit(pages.reserve, static_argnames="max_tokens")(table, lengths, max_tokens=int(lengths.sum()))
        pages.raise_for_status(info.status, operation="filling the rows")
        full, _ = pages.commit(full, lengths)
        self.start = {"decode": full, "speculate": full, "branch": jax.jit(release)(full)[0]}
        self.single = {
            name: self._compile(call, self.start[workload])
            for workload, parts in self.parts.items()
            for name, call in parts
        }
        self.scan = {workload: self._compile(self._steps(workload), self.start[workload]) for workload in self.parts}

    def _compile(self, function: Callable[..., Any], table: Any) -> Any:
        return self.jax.jit(function, donate_argnums=0).lower(table).compile()

    def _steps(self, workload: str) -> Callable[[Any], tuple[Any, Any]]:
        def step(table: Any, _: None) -> tuple[Any, Any]:
            status: Any = 0
            for __, call in self.parts[workload]:
                table, code = call(table)
                status |= code
            return table, status

        return lambda table: self.jax.lax.scan(step, table, None, length=STEPS.value)

    def _fresh(self, workload: str) -> Any:
        return self.jax.block_until_ready(self.jax.tree.map(self.jax.numpy.copy, self.start[workload]))

    def run(self, keep: bool) -> None:
        """One repeat of everything."""
        for workload, parts in self.parts.items():
            table = self._fresh(workload)
            start = clock()
            table, status = self.jax.block_until_ready(self.scan[workload](table))
            self._note(f"{workload}, scan", (clock() - start) * 1e6, keep)
            self.pages.raise_for_status(status[-1], operation=f"a step of {workload}")
            table = self._fresh(workload)
            spent = [0.0] * len(parts)
            for _ in range(STEPS.value):
                for index, (name, _) in enumerate(parts):
                    start = clock()
                    table, status = self.jax.block_until_ready(self.single[name](table))
                    spent[index] += (clock() - start) * 1e6
            self._note(f"{workload}, dispatched", sum(spent), keep)
            for (name, _), part in zip(parts, spent, strict=True):
                self._note(f"{name}, dispatched", part, keep)

    def _note(self, name: str, microseconds: float, keep: bool) -> None:
        if keep:
            self.times.setdefault(name, []).append(microseconds / STEPS.value)

    def audit(self) -> None:
        """What was timed must have left a sound table."""
        for workload in self.parts:
            broken = self.pages.check_invariants(self.scan[workload](self._fresh(workload))[0])
            if broken:
                raise RuntimeError(f"the table is unsound after the steps of {workload}: {broken}")

    def record(self) -> Record:
        """Medians and quartiles in microseconds, and the temporaries of each scan in bytes."""
        self.audit()
        return {
            "rows": self.rows,
            "num_pages": self.num_pages,
            "microseconds": {name: statistics.median(values) for name, values in self.times.items()},
            "quartiles": {
                name: statistics.quantiles(values, n=4) for name, values in self.times.items() if len(values) > 1
            },
            "temporary_bytes": {name: call.memory_analysis().temp_size_in_bytes for name, call in self.scan.items()},
        }


def measure(rows: int, pools: Sequence[int]) -> list[Record]:
    """One record a pool size, the Python pool's figures in each."""
    subjects = [Subject(rows, num_pages) for num_pages in pools]
    for repeat in range(REPEATS.value + 1):  # the first round warms up
        for subject in subjects:
            subject.run(keep=repeat > 0)
    return [subject.record() | {"python": measure_python(rows, subject.num_pages)} for subject in subjects]


def print_record(record: Record) -> None:
    """One line a workload, one a call."""
    times, python = record["microseconds"], record["python"]
    for name, theirs in python.items():
        scan, single = times.get(f"{name}, scan"), times[f"{name}, dispatched"]
        in_scan = f"{scan:>10.1f} {theirs / scan:>7.2f}" if scan else f"{'':>18}"
        print(
            f"{record['rows']:>6} {record['num_pages']:>9} {name:20s} {theirs:>10.1f} {in_scan} "
            f"{single:>12.1f} {theirs / single:>7.2f}",
            flush=True,
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if ONE_CORE.value:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA counts its threads
    import jax
    import jaxlib

    device = jax.devices()[0]
    print(f"{device.device_kind}, {platform.machine()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
    print(f"µs a step, {CLOCK.value} clock, {'one core' if ONE_CORE.value else 'all cores'}; × = Python ÷ kvjax")
    print(f"{'rows':>6} {'pages':>9} {'':20s} {'Python':>10} {'in scan':>10} {'×':>7} {'dispatched':>12} {'×':>7}")
    records = []
    for rows in map(int, ROWS.value):
        group = measure(rows, [int(pool) for pool in PAGES.value])
        for record in group:
            print_record(record)
        records += group
    if JSON.value:
        used = (PAGE_SIZE, CONTEXT, MAX_CONTEXT, STEPS, REPEATS, CLOCK, ONE_CORE)
        write_figures(JSON.value, flags={flag.name: flag.value for flag in used}, records=records)


if __name__ == "__main__":
    app.run(main)
