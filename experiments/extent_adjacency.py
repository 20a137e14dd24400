"""How long the runs of extents are, and how full the pool gets, for rows that grow in turn and under churn.

    python -m experiments.extent_adjacency [--mix short,long,mixed] [--span 8,32] [--json FILE]

No attention is computed: the allocator alone runs, as a server would drive it, one token a row and step, a new request
in the place of each that ended, admitted when the pool has room for it to its end.  Lengths are drawn, not recorded:
short chats have prompts of 20 to 400 tokens and answers of 20 to 400; long documents 4,000 to 16,000 and 100 to 1,000;
the mix has one document in four.  The figure is the mean run: mapped pages over runs, all rows together.  The page
table's own allocator (a ring, pages in the order they came back) is measured beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.figures import write_figures
from kvjax import extents as E
from kvjax import pages
from kvjax.extents.planning import number_of_runs

MIX = flags.DEFINE_list("mix", ["short", "long", "mixed"], "Length distributions: short, long, mixed.")
SPAN = flags.DEFINE_list("span", ["8", "32"], "Pages a span.")
LOAD = flags.DEFINE_float("load", 0.9, "Share of the pool that mean contexts would fill.")
STEPS = flags.DEFINE_integer("steps", 4000, "Decode steps.", lower_bound=1)
ROWS = flags.DEFINE_integer("rows", 64, "Rows.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "Of the lengths.")
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")

PAGE_SIZE, MAX_PROMPT, MAX_RUNS = 16, 16_384, 512


def lengths(mix: str, random: np.random.Generator) -> tuple[int, int]:
    """(prompt, answer) of one request, in tokens."""
    if mix == "long" or (mix == "mixed" and random.random() < 0.25):
        return int(random.integers(4000, 16_000)), int(random.integers(100, 1000))
    return int(random.integers(20, 400)), int(random.integers(20, 400))


@dataclass
class Server:
    """Rows of requests on one allocator, `module` being `kvjax.pages` or `kvjax.extents`."""

    table: Any
    module: ModuleType
    mix: str
    random: np.random.Generator
    left: np.ndarray
    promised: np.ndarray
    runs: list[float] = field(default_factory=list)
    fill: list[float] = field(default_factory=list)
    refused: int = 0

    def __post_init__(self) -> None:
        self.decode = jax.jit(partial(self.module.reserve, max_tokens=len(self.left)), donate_argnums=0)
        self.prefill = jax.jit(partial(self.module.reserve, max_tokens=MAX_PROMPT), donate_argnums=0)
        self.commit = jax.jit(self.module.commit, donate_argnums=0)
        self.release = jax.jit(partial(self.module.release, max_pages=1 << 15), donate_argnums=0)
        self.advance = jax.jit(self._advance, donate_argnums=0)
        self.waiting: tuple[int, int] | None = None

    def _advance(self, table: Any) -> Any:
        return self.module.advance(table, getattr(table, "table", table).epoch)

    @property
    def pages(self) -> pages.PageTable:
        return getattr(self.table, "table", self.table)

    def grow(self, call: Any, tokens: np.ndarray) -> np.ndarray:
        """The tokens that were granted, and are committed."""
        self.table, info = call(self.table, jnp.asarray(tokens, jnp.int32))
        self.table, _ = self.commit(self.table, info.tokens)
        return np.asarray(info.tokens)

    def step(self) -> None:
        """Requests that are done leave, one that waits enters, and all others get a token."""
        done = self.left == 0
        if done.any():
            self.table, _ = self.release(self.table, jnp.asarray(done))
            self.left[done], self.promised[done] = -1, 0
        self.table, _ = self.advance(self.table)
        while (self.left < 0).any() and self.admit():
            pass
        granted = self.grow(self.decode, (self.left > 0).astype(np.int32))
        self.refused += int(((self.left > 0) & (granted == 0)).sum())
        self.left -= granted

    def admit(self) -> bool:
        """Admits a request in the first empty row if the pool has room for it to its end."""
        self.waiting = self.waiting or lengths(self.mix, self.random)
        row, (prompt, answer) = int(np.argmax(self.left < 0)), self.waiting
        promise = -(-(prompt + answer) // PAGE_SIZE)
        if self.promised.sum() + promise > self.pages.groups[0].num_pages:
            return False
        tokens = np.zeros(len(self.left), np.int32)
        tokens[row] = prompt
        if not self.grow(self.prefill, tokens)[row]:
            return False
        self.left[row], self.promised[row], self.waiting = answer, promise, None
        return True

    def look(self) -> None:
        group = jax.tree.map(np.asarray, self.pages.groups[0])
        mapped = int(group.end.sum())
        runs = sum(number_of_runs(row[:end]) for row, end in zip(group.pages, group.end, strict=True))
        self.runs.append(mapped / max(runs, 1))
        self.fill.append(mapped / group.num_pages)


def pool_pages(mix: str, rows: int, load: float) -> int:
    """Pages of which requests of the mix, halfway through their answers, would fill the share `load`."""
    random = np.random.default_rng(1)
    drawn = [lengths(mix, random) for _ in range(4000)]
    return int(rows * np.mean([-(-(prompt + answer // 2) // PAGE_SIZE) for prompt, answer in drawn]) / load)


def churn(mix: str, span: int | None, *, rows: int, load: float, steps: int, seed: int) -> dict[str, Any]:
    """Runs a server; `span` None is the page table alone."""
    num_pages, width = pool_pages(mix, rows, load), -(-17_000 // PAGE_SIZE)
    if span is None:
        shape = pages.GroupShape(num_pages, PAGE_SIZE, width)
        server = partial(Server, pages.make_page_table([shape], rows=rows), pages)
    else:
        extent = E.ExtentShape(num_pages, PAGE_SIZE, width, max_runs=MAX_RUNS, span=span)
        server = partial(Server, E.make_extent_table([extent], rows=rows), E)
    running = server(mix, np.random.default_rng(seed), np.full(rows, -1), np.zeros(rows, int))
    for step in range(steps):
        running.step()
        if step >= steps // 4 and step % 50 == 0:
            running.look()
    return {
        "mix": mix,
        "allocator": "page table" if span is None else f"extents, span {span}",
        "num_pages": num_pages,
        "mean_run_pages": float(np.mean(running.runs)),
        "least_mean_run_pages": float(np.min(running.runs)),
        "fill": float(np.mean(running.fill)),
        "refused_tokens": running.refused,
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    figures = []
    for mix in MIX.value:
        for span in [None, *map(int, SPAN.value)]:
            figures.append(churn(mix, span, rows=ROWS.value, load=LOAD.value, steps=STEPS.value, seed=SEED.value))
            f = figures[-1]
            print(
                f"{mix:6s} {f['allocator']:18s} {f['num_pages']:>7,} pages, {100 * f['fill']:3.0f} % mapped: mean run "
                f"{f['mean_run_pages']:6.1f} pages, least {f['least_mean_run_pages']:6.1f}; "
                f"{f['refused_tokens']} tokens refused",
                flush=True,
            )
    if JSON.value:
        write_figures(JSON.value, churn=figures)


if __name__ == "__main__":
    app.run(main)
