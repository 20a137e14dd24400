"""Into how many runs of adjacent pages rows fall while requests come and go, and what moving pages together brings.

The traces are those of `cache_traces`.  The allocators alone run, a turn's growth of all rows in one call; the pool is
so large that it is 95 % full when the trace needs most.  A kernel over extents issues a copy for every run, or for each
block of a long one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cache_steps import PAGE_TOKENS, SPEC
from experiments.cache_traces import CONTEXT, PREFIX_TOKENS, ROWS, Lengths, trace
from kvjax import extents as E
from kvjax import pages
from kvjax.extents.planning import number_of_runs

FULL = 0.95
MOST_RUNS = 2.0
"""Rows in more runs than this, on the average, are moved together."""
MAX_TOKENS, MAX_PAGES = 1 << 17, (ROWS + 1) * (CONTEXT // PAGE_TOKENS)
LIMITS = E.CompactionLimits(moves=512, entries=8192, pages=MAX_PAGES)
ALLOCATORS = ("page table", "extents", "extents, moved")


@dataclass
class Server:
    """Rows of requests on one allocator; the row after the last holds the shared prefix.

    Attributes:
      table: its state.
      moving: pages are moved together.
      runs: mean runs a row after each turn.
      moves: pages moved in each compaction.
      gains: runs of all rows before and after each.
    """

    table: Any
    moving: bool
    prefix: int
    rows: dict[int, int] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    gains: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        module = pages if isinstance(self.table, pages.PageTable) else E
        self._turn = jax.jit(partial(_turn, module), donate_argnums=0)
        self._compact = jax.jit(partial(_compact, max_pages=LIMITS.pages), donate_argnums=0)
        if self.prefix:
            self._call({}, {ROWS: self.prefix}, set())

    def serve(self, live: dict[int, int]) -> None:
        """One turn of a trace."""
        gone = [self.rows.pop(request) for request in self.rows.keys() - live.keys()]
        free = sorted(set(range(ROWS)) - set(self.rows.values()))
        fresh = dict(zip(sorted(live.keys() - self.rows.keys()), free, strict=False))
        self.rows |= fresh
        self._call(dict.fromkeys(fresh.values(), ROWS), {self.rows[one]: live[one] for one in live}, set(gone))
        if self.moving and self._mean_runs() > MOST_RUNS:
            self._move()
        self.runs.append(self._mean_runs())

    @property
    def owner(self) -> pages.PageTable:
        return getattr(self.table, "table", self.table)

    def _call(self, parents: dict[int, int], lengths: dict[int, int], gone: set[int]) -> None:
        parent, length = np.full(ROWS + 1, ROWS + 1, np.int32), np.zeros(ROWS + 1, np.int32)
        if self.prefix:
            parent[list(parents)] = list(parents.values())
        length[list(lengths)] = list(lengths.values())
        leaves = np.isin(np.arange(ROWS + 1), list(gone))
        self.table, status = self._turn(self.table, leaves, parent, length)
        pages.raise_for_status(status, operation="a turn of the trace")

    def _of_rows(self) -> Iterator[np.ndarray]:
        """Pages of each row with a request."""
        group = jax.tree.map(np.asarray, self.owner.groups[0])
        return (group.pages[row, : group.end[row]] for row in self.rows.values())

    def _mean_runs(self) -> float:
        return float(np.mean([number_of_runs(row) for row in self._of_rows()]))

    def _move(self) -> None:
        before = sum(map(number_of_runs, self._of_rows()))
        moves = E.plan_compaction(self.table, LIMITS, most_runs=1)
        if moves is not None:
            self.table, status = self._compact(self.table, moves)
            pages.raise_for_status(status, operation="compaction")
            self.moves.append(int((np.asarray(moves.source) < self.owner.groups[0].num_pages).sum()))
            self.gains.append((before, sum(map(number_of_runs, self._of_rows()))))


def churn(lengths: Lengths, allocator: str, *, shared: bool, turns: int) -> dict[str, Any]:
    """Serves one trace on one of the ALLOCATORS."""
    prefix = PREFIX_TOKENS if shared else 0
    whole = prefix // PAGE_TOKENS
    needs = [
        sum(-(-length // PAGE_TOKENS) - whole for length in live.values()) + -(-prefix // PAGE_TOKENS)
        for live in trace(lengths, prefix=prefix, turns=turns)
    ]
    shape = pages.GroupShape(int(max(needs) / FULL), PAGE_TOKENS, CONTEXT // PAGE_TOKENS)
    if allocator == "page table":
        table: Any = pages.make_page_table([shape], rows=ROWS + 1)
    else:
        table = E.make_extent_table([E.ExtentOptions(max_runs=shape.width).shape(shape, rows=ROWS)], rows=ROWS + 1)
    server = Server(table, allocator == ALLOCATORS[2], prefix)
    for live in trace(lengths, prefix=prefix, turns=turns):
        server.serve(live)
    page_bytes = PAGE_TOKENS * SPEC.bytes_per_token
    return {
        "lengths": lengths.name,
        "shared_prefix": shared,
        "allocator": allocator,
        "num_pages": shape.num_pages,
        "filled": float(np.mean(needs)) / shape.num_pages,
        "pages_a_row": float(np.mean(needs)) / ROWS,
        "mean_runs": float(np.mean(server.runs)),
        "most_runs": max(server.runs),
        "compactions": len(server.moves),
        "moved_bytes": page_bytes * sum(server.moves),
        "runs_before": float(np.mean([before for before, _ in server.gains])) if server.gains else None,
        "runs_after": float(np.mean([after for _, after in server.gains])) if server.gains else None,
        "series": server.runs,
    }


def _turn(module: Any, table: Any, gone: jax.Array, parent: jax.Array, length: jax.Array) -> tuple[Any, jax.Array]:
    """Rows leave, children of the prefix begin, and all grow to their lengths, by one program; the worst status."""
    table, left = module.release(table, gone, max_pages=MAX_PAGES)
    table, _ = module.advance(table, getattr(table, "table", table).epoch)
    table, begun = module.fork(table, parent, max_pages=MAX_PAGES)
    now = getattr(table, "table", table).length
    table, grown = module.reserve(table, jnp.maximum(length - now, 0), max_tokens=MAX_TOKENS)
    table, done = module.commit(table, grown.tokens)
    return table, jnp.max(jnp.stack([left.status, begun.status, grown.status, done.status]), axis=0)


def _compact(table: E.ExtentTable, moves: E.Moves, *, max_pages: int) -> tuple[E.ExtentTable, jax.Array]:
    table, info = E.compact(table, moves, max_pages=max_pages)
    table, _ = E.advance(table, table.table.epoch)
    return table, info.status
