"""Preemption by swap: the pages of those who give way move to host memory, and back when it is their turn again.

The rows are emptied at once.  Their pages are pinned until the copy has arrived on the host, and only then free: the
page table itself shows that they may not be reused yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from kvjax.engine.executables import power_of_two
from kvjax.engine.runner import Runner
from kvjax.engine.sequence import Generation, Holder, pages_for
from kvjax.engine.swap_steps import CacheImages, PageIds
from kvjax.pages.status import raise_for_status

SMALLEST_SAVE = 8
"""Pages a save is padded to at least; beyond it to powers of two, so that few sizes are compiled."""


@dataclass(eq=False, slots=True)
class Saved:
    """What the rows of one unit held.

    Attributes:
      computed: tokens the cache held for each member that still wants them, by request id.
      shared: pages at the front that all members had in common, saved once.
      start: where each member's own pages begin among the saved ones, by request id.
      number: pages saved.
      num_bytes: bytes of `images`, padding included.
      images: the pages, in host memory or on their way there.
      pinned: ids of the pages that are held until the copy has arrived; None from then on.
    """

    computed: dict[int, int]
    shared: int
    start: dict[int, int]
    number: int
    num_bytes: int
    images: CacheImages
    pinned: PageIds | None = field(repr=False)

    @property
    def arrived(self) -> bool:
        return all(image.is_ready() for image in jax.tree.leaves(self.images))


class Swap:
    """Moves units between the rows of a runner's cache and at most `limit` bytes of host memory.

    Attributes:
      page_bytes: of one page, all layers and tensors.
      held: everything saved whose pages are still wanted or still arriving.
    """

    def __init__(self, runner: Runner, *, page_size: int, limit: int):
        self._runner = runner
        self._page_size = page_size
        self._limit = limit
        cache = runner.cache
        self._device_memory = jax.tree.leaves(cache.pools)[0].sharding.memory_kind
        self.page_bytes = sum(
            pool.nbytes // group.num_pages
            for pools, group in zip(cache.pools, cache.table.groups, strict=True)
            for pool in pools.values()
        )
        self.held: list[Saved] = []

    @property
    def num_bytes(self) -> int:
        """Host memory in use."""
        return sum(saved.num_bytes for saved in self.held)

    @property
    def arriving(self) -> int:
        """Pages that will be free once the copies under way have arrived, unless somebody else holds them too."""
        return sum(saved.number for saved in self.held if saved.pinned is not None)

    def save(self, unit: Ordered[Generation]) -> Saved | None:
        """Starts moving what the rows of a unit hold; the rows may be released right after.

        None, and nothing happens, if they hold nothing or the host has no room.
        """
        shared = unit[0].shared_pages(self._page_size) if len(unit) > 1 else 0
        parts = [_entries(unit[0].row, 0, shared)]
        parts += [_entries(one.row, shared, pages_for(one.computed, self._page_size)) for one in unit]
        number = sum(part.shape[1] for part in parts)
        bucket = power_of_two(max(number, SMALLEST_SAVE))
        if number == 0 or self.num_bytes + bucket * self.page_bytes > self._limit:
            return None
        ends = np.cumsum([part.shape[1] for part in parts]).tolist()
        row, logical = self._padded(np.concatenate(parts, axis=1), bucket)
        runner = self._runner
        runner.cache, pinned, images = runner.executables.save(runner.cache, row, logical)
        saved = Saved(
            computed={one.id: one.computed for one in unit},
            shared=shared,
            start={one.id: end for one, end in zip(unit, ends, strict=False)},
            number=number,
            num_bytes=bucket * self.page_bytes,
            images=_moved(images, "pinned_host"),
            pinned=pinned,
        )
        self.held.append(saved)
        return saved

    def collect(self, *, wait: bool = False) -> None:
        """Lets go of the pages whose copies have arrived, all of them after waiting if `wait`."""
        for saved in self.held:
            if saved.pinned is None:
                continue
            if wait:
                jax.block_until_ready(saved.images)
            if saved.arrived:
                runner = self._runner
                runner.cache, status, free = runner.executables.unpin(runner.cache, saved.pinned)
                for codes in status:
                    raise_for_status(codes, operation="unpinning saved pages")
                runner.free, saved.pinned = int(free), None
        self._drop_unwanted()

    def restore(self, unit: Ordered[Generation]) -> None:
        """Brings a unit's pages back into its rows; what was shared inside the unit is shared again.

        There must be as many free pages as `pages_to_restore`.
        """
        saved, first = unit[0].saved, unit[0]
        assert saved is not None
        images = _moved(saved.images, self._device_memory)
        start = saved.shared * self._page_size
        if saved.shared:
            self._write(saved, images, {first.row: start}, [(0, _entries(first.row, 0, saved.shared))])
            self._runner.share({one.row: first.row for one in unit[1:]}, saved.shared * len(unit[1:]))
        own = []
        for one in unit:
            last = pages_for(saved.computed[one.id], self._page_size)
            own.append((saved.start[one.id], _entries(one.row, saved.shared, last)))
        self._write(saved, images, {one.row: saved.computed[one.id] - start for one in unit}, own)
        common = Holder(first.tokens[:start], first.order, computed=start) if saved.shared and len(unit) > 1 else None
        for one in unit:
            one.computed, one.holder = saved.computed[one.id], common
            self.forget(one)

    def forget(self, generation: Generation) -> None:
        """Gives up what is saved for a generation: it is back, cancelled, or will be computed anew."""
        if generation.saved is not None:
            del generation.saved.computed[generation.id]
            generation.saved = None
            self._drop_unwanted()

    def _write(
        self,
        saved: Saved,
        images: CacheImages,
        tokens: dict[int, int],
        places: Ordered[tuple[int, np.ndarray]],
    ) -> None:
        """Puts saved pages into rows: each part of `places` is (its first page among the saved ones, its entries)."""
        runner = self._runner
        row, logical = self._padded(np.zeros((2, 0), np.int32), saved.num_bytes // self.page_bytes)
        for start, (rows, pages) in places:
            row[start : start + len(rows)], logical[start : start + len(rows)] = rows, pages
        counts = np.zeros(runner.rows, np.int32)
        counts[list(tokens)] = list(tokens.values())
        runner.cache, status, free = runner.executables.restore(runner.cache, counts, row, logical, images)
        raise_for_status(status, operation="restoring saved pages")
        runner.free = int(free)

    def _padded(self, entries: np.ndarray, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        row, logical = np.full(bucket, self._runner.rows, np.int32), np.zeros(bucket, np.int32)
        row[: entries.shape[1]], logical[: entries.shape[1]] = entries
        return row, logical

    def _drop_unwanted(self) -> None:
        self.held = [saved for saved in self.held if saved.computed or saved.pinned is not None]


def pages_to_restore(unit: Ordered[Generation], page_size: int) -> int:
    """Pages that bringing a saved unit back takes."""
    saved = unit[0].saved
    assert saved is not None
    return saved.shared + sum(pages_for(saved.computed[one.id], page_size) - saved.shared for one in unit)


def _entries(row: int, first: int, last: int) -> np.ndarray:
    """(row, logical page) of the pages [first, last) of a row: Int32[2, last − first]."""
    logical = np.arange(first, last, dtype=np.int32)
    return np.stack([np.full_like(logical, row), logical])


def _moved(images: Any, memory: str) -> Any:
    """The same arrays in another memory of their devices; starts the copy and does not wait."""
    return jax.tree.map(lambda image: jax.device_put(image, image.sharding.with_memory_kind(memory)), images)
