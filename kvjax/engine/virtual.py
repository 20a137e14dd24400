"""The engine on virtual memory: the backing, and the calls that make memory resident before the device runs.

A `VirtualSpace` is the cache that the runner holds.  Ownership of memory is the host's: rows are forked and released
without the device, and a step or a burst finds the positions that it may write mapped, or refuses the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from kvjax.attention.xla import BLOCK_TOKENS
from kvjax.engine.burst import Decode
from kvjax.engine.executables import Executables, executables_of
from kvjax.engine.steps import Feed, Report, Slots
from kvjax.pages.status import Status
from kvjax.spec import CacheSpec
from kvjax.virtual import HostSubstrate, Substrate, VirtualCache, VirtualSpace
from kvjax.virtual.span import span_layout


@dataclass(frozen=True, slots=True)
class VirtualBacking:
    """A `kvjax.virtual.VirtualSpace`: contiguous rows, `num_pages` page-groups of memory mapped behind them on demand.

    Attributes:
      spec: of the model that the engine will serve; page-groups are sized by it.
      num_pages: page-groups of memory.
      max_context: positions a row may hold.
      page_group_bytes: least bytes a page-group.
      lookahead: tokens a row to have mapped past each step, in the background; a burst's length makes a steady decode
        free of mapping.
      substrate: the platform; Linux virtual memory if None.
      page_size: tokens a page-group, which follows from the rest.

    Raises:
      NotImplementedError: a window group.
      OSError: there is no such platform here.
    """

    spec: CacheSpec
    num_pages: int
    max_context: int
    page_group_bytes: int = 65536
    lookahead: int = 16
    substrate: Substrate | None = None
    shares_pages: bool = True
    has_page_table: bool = False
    page_size: int = field(init=False)

    def __post_init__(self) -> None:
        substrate = HostSubstrate() if self.substrate is None else self.substrate
        layout = span_layout(
            self.spec,
            rows=1,
            max_context=self.max_context,
            page_group_bytes=self.page_group_bytes,
            granularity=substrate.granularity,
            block=BLOCK_TOKENS,
            reads_at_once=substrate.reads_at_once,
        )
        object.__setattr__(self, "page_size", layout.page_tokens)

    def init(self, spec: CacheSpec, rows: int) -> VirtualSpace:
        if spec != self.spec:
            raise NotImplementedError(
                f"VirtualBacking was made for a spec of groups {_names(self.spec)}, and the engine's model caches "
                f"{_names(spec)}; pass the model's own spec, and draft with PromptLookup: a draft model needs "
                "PagedBacking"
            )
        if self.substrate is None and jax.default_backend() != "cpu":
            raise NotImplementedError(
                f"Linux virtual memory serves the CPU, and this process runs on {jax.default_backend()}; set "
                "JAX_PLATFORMS=cpu, or pass the substrate of that platform"
            )
        return VirtualSpace(
            spec,
            rows=rows,
            num_pages=self.num_pages,
            max_context=self.max_context,
            page_group_bytes=self.page_group_bytes,
            substrate=self.substrate,
            lookahead=self.lookahead,
        )

    def advance(self, cache: VirtualCache) -> VirtualCache:
        return cache

    def free(self, cache: VirtualCache) -> Int32[Array, ""]:
        return jnp.int32(0)  # The host counts, after the call.

    def faults(self, cache: VirtualCache) -> Int32[Array, ""]:
        return jnp.int32(0)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Memory for a call.

    Attributes:
      count: positions each row may come to write; 0 for rows that take no part.
      least: those it cannot go on without.
      order: priority of each row.
    """

    count: Int[np.ndarray, " rows"]
    least: Int[np.ndarray, " rows"]
    order: Int[np.ndarray, " rows"]


class VirtualExecutables(Executables):
    """Runs steps on a virtual space, each with the memory that its rows may write; forks and releases on the host."""

    def mixed(self, cache: VirtualSpace, feed: Feed, slots: Slots) -> tuple[VirtualSpace, Report]:
        count, order = np.asarray(feed.count), np.asarray(feed.order)
        return self._on_space("mixed", len(feed.tokens), cache, _Wanted(count, count, order), feed, slots)

    def burst(self, cache: VirtualSpace, decode: Decode, slots: Slots) -> tuple[VirtualSpace, Report]:
        rows = np.asarray(slots.row)
        live = rows < len(decode.order)
        count = np.zeros(len(decode.order), np.int64)
        most = int(decode.steps) * (self._drafter.tokens + 1)
        count[rows[live]] = np.minimum(np.asarray(decode.limit), most)[live]
        wanted = _Wanted(count, np.minimum(count, 1), np.asarray(decode.order))
        return self._on_space("burst", len(rows), cache, wanted, decode, slots)

    def release(
        self, cache: VirtualSpace, rows: Bool[np.ndarray, " rows"], pages: int
    ) -> tuple[VirtualSpace, Int32[np.ndarray, " rows"], int]:
        for row in np.flatnonzero(rows):
            cache.release(int(row))
        return cache, np.full(len(rows), Status.OK, np.int32), cache.available

    def fork(
        self, cache: VirtualSpace, parent: Int32[np.ndarray, " rows"], pages: int
    ) -> tuple[VirtualSpace, Int32[np.ndarray, " rows"]]:
        status, length = np.full(len(parent), Status.OK, np.int32), cache.length
        for child in np.flatnonzero(parent < len(parent)):
            source = int(parent[child])
            cache.admit(int(length[source]), shared=int(length[source]), row=int(child))
            status[child] = cache.alias(source, int(child), int(length[source]))
        return cache, status

    def _on_space(
        self, name: str, bucket: int, space: VirtualSpace, wanted: _Wanted, *arguments: Any
    ) -> tuple[VirtualSpace, Report]:
        """Runs a function of (parameters, cache, …) with the memory that rows want, and commits what it says."""
        copies = space.figures().counters.copies
        self._open(space, wanted)
        order, report = self._run(name, bucket, (), self._parameters, space.cache(), *arguments)
        space.follow(order)
        space.commit(space.length + np.asarray(report.committed))
        status = np.asarray(report.status)
        report = replace(
            report,
            # What is not resident could not be had: the host has tried.
            status=np.where(status == Status.NOT_RESERVED, Status.OUT_OF_PAGES, status),
            copies=space.figures().counters.copies - copies,
            free=space.available,
        )
        return space, report

    def _open(self, space: VirtualSpace, wanted: _Wanted) -> None:
        """Makes what rows want resident; where memory lacks, what there is already or else the least they need.

        If even that is refused, no row gets more than its least: else some would hold memory for a whole burst while
        others could not go on by one token, and nobody would give way.
        """
        count, length = wanted.count, space.length
        for row in np.flatnonzero((count > 0) & (length == 0)):
            space.admit(int(count[row]), row=int(row))
        lengths = np.where(count > 0, length + count, 0)
        refused = space.step(lengths, wanted.order) != Status.OK
        if np.any(refused & (wanted.least < count)):
            fewer = np.clip(space.resident, length + wanted.least, lengths)
            space.follow(())  # Nothing ran: what that step was given can be taken back.
            refused = space.step(np.where(refused, fewer, lengths), wanted.order) != Status.OK
            if np.any(refused):
                space.follow(())
                space.step(np.where(count > 0, length + wanted.least, 0), wanted.order)

    def _compile(self, function: Callable, arguments: tuple[Any, ...]) -> Callable:
        # Mapped memory cannot be donated, and to return it would be a copy.
        def on_space(parameters: Any, cache: VirtualCache, *others: Any) -> tuple[Int32[Array, ""], Report]:
            cache, report = function(parameters, cache, *others)
            return cache.order, report

        return jax.jit(on_space).lower(*arguments).compile()


@executables_of.register
def _(backing: VirtualBacking) -> type[VirtualExecutables]:
    return VirtualExecutables


def _names(spec: CacheSpec) -> str:
    return ", ".join(group.name for group in spec.groups)
