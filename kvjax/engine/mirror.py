"""The page table on the host, without ever reading it back: the same transitions, replayed on a CPU device.

A burst decides on the device what to reserve and commit; it returns these decisions as a small `Log`.  Everything else
that moves ownership was asked for by the host.  Both are run again on a cache that has a table and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Int32

from kvjax.cache import KVCache, reorder
from kvjax.engine.backing import Backing
from kvjax.engine.steps import Log, close_step, open_step
from kvjax.extents import ExtentShape, make_extent_table
from kvjax.pages import GroupShape, PageTable
from kvjax.pages.table import make_page_table
from kvjax.spec import CacheSpec


def without_bytes(cache: KVCache) -> KVCache:
    """A new, empty cache with the page table of `cache` (arrays or shapes) and no pools, on a CPU device."""
    groups = [GroupShape(group.num_pages, group.page_size, group.width) for group in cache.table.groups]
    extents = None
    if cache.extents is not None:
        extents = [
            ExtentShape(shape.num_pages, shape.page_size, shape.width, max_runs=each.runs.max_runs, span=each.span)
            for shape, each in zip(groups, cache.extents, strict=True)
        ]
    epochs = cache.table.groups[0].fences.shape[0]
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        if extents is None:
            ownership: Any = make_page_table(groups, rows=cache.rows, max_epochs=epochs)
        else:
            ownership = make_extent_table(extents, rows=cache.rows, max_epochs=epochs)
        ownership = jax.device_put(ownership, device)
    return replace(cache.with_ownership(ownership), pools=tuple({} for _ in groups))


def replay(
    backing: Backing,
    max_tokens: int,
    drafts: int,
    slots: int,
    cache: Any,
    log: Log,
    order: Int32[Array, " rows"],
    max_pages: int = 0,
) -> Any:
    """The cache after the steps of a log, which were run with the same arguments; traceable.

    `max_tokens` may be larger than it was.  `max_pages` bounds the reorders, if the log has any.
    """

    def one(step: Int32[Array, ""], cache: Any) -> Any:
        cache, grant = open_step(backing, cache, log.reserve[step], order, max_tokens=max_tokens)
        cache = close_step(backing, cache, grant, log.commit[step], drafts=drafts, slots=slots)
        if log.parent is not None:
            cache, _ = reorder(cache, log.parent[step], max_pages=max_pages)
        return cache

    return lax.fori_loop(0, log.steps, one, cache)


class Mirror:
    """Follows the calls that `Executables` makes on the real cache.

    Attributes:
      cache: a cache without bytes, whose table equals the real one's, bit for bit.
    """

    def __init__(self, backing: Backing, spec: CacheSpec, *, rows: int, drafts: int):
        self._backing = backing
        self._drafts = drafts
        self._jitted: dict[tuple, Callable] = {}
        self._pinned: list[tuple[Any, Any]] = []  # the ids that the real cache gave, and the same on this one
        self.cache = without_bytes(jax.eval_shape(partial(backing.init, spec, rows)))

    @property
    def table(self) -> PageTable:
        return self.cache.table

    def follow(self, name: str, static: tuple[int, ...], function: Callable, arguments: tuple, result: tuple) -> None:
        """Does what `function(*static, *arguments)`, called `name`, did to the real cache when it gave `result`."""
        if name == "mixed":
            _, _, feed, _ = arguments
            self._replay(result[1].log, feed.order, feed.tokens.shape[0], 0, 0)
        elif name == "burst":
            _, _, decode, slots = arguments
            number = slots.row.shape[0]
            self._replay(result[1].log, decode.order, number * (self._drafts + 1), self._drafts, number)
        else:
            _, *others = arguments
            if name == "unpin":
                others = [self._ids_of(others[0])]
            elif name == "restore":
                others[-1] = tuple({} for _ in self.table.groups)
            gave = self._run((name, static), partial(function, *static), *others)
            if name == "save":
                self._pinned.append((result[1], gave[0]))

    def _replay(self, log: Log, order: Any, max_tokens: int, drafts: int, slots: int) -> None:
        key = ("replay", max_tokens, drafts, slots, log.reserve.shape)
        self._run(key, partial(replay, self._backing, max_tokens, drafts, slots), log, order)

    def _run(self, key: tuple, function: Callable, *arguments: Any) -> list[Any]:
        """Moves on to the cache that `function` returns first; gives the rest."""
        if key not in self._jitted:
            self._jitted[key] = jax.jit(function, donate_argnames="cache")
        result = self._jitted[key](self.cache, *jax.device_get(arguments))
        self.cache, *rest = result if isinstance(result, tuple) else (result,)
        return rest

    def _ids_of(self, ids: Any) -> Any:
        """This cache's ids of pages that a `save` pinned, and that are now let go."""
        index = next(index for index, (real, _) in enumerate(self._pinned) if real is ids)
        return self._pinned.pop(index)[1]
