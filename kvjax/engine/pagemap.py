"""Who owned which page when: snapshots of the page table, and a picture of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FREE = -1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the pool.

    Attributes:
      seconds: when.
      owner: index into `PageMap.owners` a page; `FREE` where nobody holds it.
      shared: pages with several holders.
    """

    seconds: float
    owner: np.ndarray
    shared: np.ndarray


class PageMap:
    """Snapshots of the first group's pages, one a step, O(rows · width + pages) each."""

    def __init__(self) -> None:
        self.owners: list[str] = []
        self.snapshots: list[Snapshot] = []

    def record(self, table: Any, labels: Mapping[int, str], seconds: float) -> None:
        """Adds a snapshot of a `PageTable` whose rows belong to `labels`.

        A shared page counts as its first owner's in the order of `labels`.
        """
        group = table.groups[0]
        pages, end = np.asarray(group.pages), np.asarray(group.end)
        owner = np.full(group.num_pages, FREE, np.int32)
        index = {row: self._index(label) for row, label in labels.items()}
        for row in reversed(index):
            owner[pages[row, : end[row]]] = index[row]
        self.snapshots.append(Snapshot(seconds, owner, np.asarray(group.refcount) > 1))

    def draw(self, path: str | Path, *, title: str = "Page map") -> None:
        """Writes a PNG: physical pages upwards, time to the right, one colour an owner, shared pages hatched.

        Raises:
          RuntimeError: matplotlib is not installed.
          ValueError: nothing was recorded.
        """
        if not self.snapshots:
            raise ValueError("the page map is empty: no step was recorded")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise RuntimeError("the page map needs matplotlib: pip install 'kvjax[plots]'") from error

        colours = _palette(len(self.owners))
        owner = np.stack([snapshot.owner for snapshot in self.snapshots], axis=1)
        shared = np.stack([snapshot.shared for snapshot in self.snapshots], axis=1)
        image = np.where((owner == FREE)[..., None], FREE_COLOUR, colours[np.maximum(owner, 0)])
        # A step's pages are drawn from its end to the end of the next one.
        times = np.array([snapshot.seconds - self.snapshots[0].seconds for snapshot in self.snapshots])
        edges = np.append(times, times[-1] + (np.median(np.diff(times)) if len(times) > 1 else 1.0))

        figure = Figure(figsize=(12, 6.5), layout="constrained")
        axes = figure.add_subplot()
        axes.pcolormesh(edges, np.arange(len(owner) + 1), image, rasterized=True)
        for page, steps in enumerate(shared):
            runs = [(edges[start], edges[end] - edges[start]) for start, end in _runs(steps)]
            axes.broken_barh(runs, (page, 1), facecolor="none", edgecolor="white", hatch="////", linewidth=0)
        axes.set(xlabel="time (s)", ylabel="physical page", title=title)
        patches = [Patch(facecolor=tuple(colours[index]), label=label) for index, label in enumerate(self.owners)]
        patches.append(Patch(facecolor="grey", edgecolor="white", hatch="////", label="shared"))
        patches.append(Patch(facecolor=tuple(FREE_COLOUR), edgecolor="grey", label="free"))
        figure.legend(handles=patches, loc="outside right upper", fontsize="small")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure).print_png(str(path))

    def _index(self, label: str) -> int:
        if label not in self.owners:
            self.owners.append(label)
        return self.owners.index(label)


def _runs(marks: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of every run of true marks."""
    change = np.flatnonzero(np.diff(np.concatenate([[False], marks, [False]]).astype(np.int8)))
    return list(zip(change[::2].tolist(), change[1::2].tolist(), strict=True))


FREE_COLOUR = np.array([0.96, 0.96, 0.96])


def _palette(number: int) -> np.ndarray:
    """`number` distinguishable colours; the first, for what is recorded first, is a dark grey.

    No other is grey: that is the colour of the legend's "shared" and, very light, of free pages.
    """
    from matplotlib import colormaps

    table = np.concatenate([colormaps[name](np.arange(20))[:, :3] for name in ("tab20", "tab20b", "tab20c")])
    table = table[np.ptp(table, axis=1) > 0.05]
    return np.concatenate([[[0.25, 0.25, 0.25]], table])[np.arange(number) % (len(table) + 1)]
