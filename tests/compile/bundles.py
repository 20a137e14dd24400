"""Reads what libtpu makes of a TPU kernel: its VLIW bundles, the loops among them and the units that each one uses.

Import this module before anything loads libtpu, which takes the flags that make it write its bundles down only when it
is loaded. Use one process for one target.

    for kernel in kernels("v6e", function, *shapes):
        loop = kernel.innermost(block_bytes)
        print(kernel.name, loop.shortest(block_bytes).bundles)
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from glob import escape as glob_escape
from itertools import pairwise
from pathlib import Path
from typing import Any

DUMP = Path(tempfile.mkdtemp(prefix="bundles-"))
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
os.environ["LIBTPU_INIT_ARGS"] = (
    f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true"
)

from tests.compile.tpu_target import compile_for  # noqa: E402

# Bundles after a branch that are executed before it takes effect, as the region marks in the listings show.
DELAY_SLOTS = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4, "tpu7x": 1}
# A granule of a copy between memories: a page of 64 KiB is 128 granules on v4 and 2,048 elsewhere.
GRANULE_BYTES = {"v4": 512, "v5e": 32, "v5p": 32, "v6e": 32, "tpu7x": 32}
VECTOR_BYTES = 4096  # what one vector load brings: 8 sublanes of 128 lanes of 32 bits

BUNDLE = re.compile(r"^ *(?:0x([0-9a-f]+)|(0)) +(?:[A-Z]{2})?:", re.MULTILINE)
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
BRANCH = re.compile(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)")
COPY = re.compile(r"dma\.(?:hbm_to_vmem|general) [^;}]*?size_in_granules=\*/(\d+|%s\w+)")
WAIT = re.compile(r"dma\.done\.wait [^;}]*?, (\d+)")
LOAD = re.compile(r"= vld[\w.]* \[vmem:\[(?!#allocation\d+_spill)")
ENTRY = re.compile(r"/\* entry bundle: %(\S+) = custom-call\(")


class ListingError(ValueError):
    """The compiler's listings are not what this module knows how to read."""


@dataclass(frozen=True)
class Work:
    """What some bundles do."""

    bundles: int = 0
    use: tuple[int, ...] = ()  # slots taken of each of Kernel.units
    copies: int = 0  # from HBM to vector memory that are started
    copied: int = 0  # bytes of those whose size is known
    waited: int = 0  # bytes of copies that are waited for
    loaded: int = 0  # bytes loaded from vector memory, reloads of spilled registers left out

    def __add__(self, other: "Work") -> "Work":
        use = tuple(a + b for a, b in zip(self.use, other.use, strict=True)) if self.use else other.use
        return Work(
            self.bundles + other.bundles,
            use,
            self.copies + other.copies,
            self.copied + other.copied,
            self.waited + other.waited,
            self.loaded + other.loaded,
        )

    def __mul__(self, times: int) -> "Work":
        use = tuple(times * slots for slots in self.use)
        counts = (self.copies, self.copied, self.waited, self.loaded)
        return Work(times * self.bundles, use, *(times * count for count in counts))

    @property
    def moved(self) -> tuple[int, int, int]:
        return self.copied, self.waited, self.loaded


@dataclass(frozen=True)
class Loop:
    """Bundles [first, end) of a kernel, which run again and again."""

    kernel: "Kernel"
    first: int
    end: int

    @property
    def bundles(self) -> int:
        return self.end - self.first

    @property
    def depth(self) -> int:
        """How many loops it is in, itself included."""
        return sum(loop.first <= self.first and self.end <= loop.end for loop in self.kernel.loops)

    @cached_property
    def inner(self) -> list["Loop"]:
        """The loops right inside."""
        inside = [loop for loop in self.kernel.loops if loop != self and self.first <= loop.first < self.end]
        return [loop for loop in inside if loop.depth == self.depth + 1]

    def shortest(self, block_bytes: int) -> Work | None:
        """The quickest iteration that handles a block. See `_iteration`."""
        return self._iteration(block_bytes, min)

    def longest(self, block_bytes: int) -> Work | None:
        """The slowest iteration that handles a block, whatever its branches depend on. See `_iteration`."""
        return self._iteration(block_bytes, max)

    def _iteration(self, block_bytes: int, choose: Callable) -> Work | None:
        """An iteration that loads `block_bytes` from vector memory, and starts and awaits copies of as many.

        Branches may go either way; an inner loop runs as often as it must to do its part of that, or once if it has
        none. Copies and waits are asked for only if the loop has any whose size is known. None: no path does all that.
        """
        need = tuple(block_bytes if total else 0 for total in self.kernel.work(self.first, self.end).moved)
        return self._path(need, choose)

    def _path(self, need: tuple[int, ...], choose: Callable) -> Work | None:
        inner = {loop.first: loop for loop in self.inner}
        # What has been done on the way to an address, by how much of the need is met.
        reached: dict[int, dict[tuple[int, ...], Work]] = {self.first: {(0, 0, 0): Work()}}

        def arrive(address: int, work: Work) -> None:
            met = tuple(map(min, work.moved, need))
            before = reached.setdefault(address, {}).get(met)
            reached[address][met] = work if before is None else choose(before, work, key=lambda work: work.bundles)

        for start, stop in self._blocks():
            for done in reached.pop(start, {}).values():
                if start in inner:
                    arrive(stop, done + inner[start]._repeated(done, need, choose))
                    continue
                done = done + self.kernel.work(start, stop)
                target = self.kernel.branch_ending(stop)
                for successor in {stop, target}:
                    if successor == self.first:
                        arrive(self.end, done)
                    elif successor is not None and start < successor <= self.end:
                        arrive(successor, done)
        return reached.get(self.end, {}).get(need)

    def _repeated(self, done: Work, need: tuple[int, ...], choose: Callable) -> Work:
        """As many iterations of this loop as meet the need that it can meet."""
        once = self._path((0, 0, 0), choose)
        parts = self._path(tuple(map(bool, self.kernel.work(self.first, self.end).moved)), choose) or once
        assert parts is not None, "a loop whose end is never reached"
        trips = [-(-(n - d) // part) for n, d, part in zip(need, done.moved, parts.moved, strict=True) if part]
        return parts * max(1, *trips, 1)

    def _blocks(self) -> list[tuple[int, int]]:
        """The straight runs of bundles of this loop, and the loops right inside it, in order."""
        cuts = {self.first, self.end}
        for address, target in self.kernel.branches.items():
            if self.first <= address < self.end:
                cuts |= {self.kernel.after(address), target}
        for loop in self.inner:
            cuts = {cut for cut in cuts if not loop.first < cut < loop.end} | {loop.first, loop.end}
        ordered = sorted(cut for cut in cuts if self.first <= cut <= self.end)
        return list(pairwise(ordered))


@dataclass(frozen=True, eq=False)
class Kernel:
    """A Pallas kernel as the compiler left it."""

    name: str
    target: str
    units: dict[str, int]  # slots of each unit in a bundle
    per_bundle: list[Work]
    branches: dict[int, int]  # the address of a branch, and where it may go
    scalar_spills: int  # spilled to scalar memory, in the text of the whole kernel
    one_core: bool  # of the two that the device has, all but the first skip the kernel

    def work(self, first: int, end: int) -> Work:
        """What the bundles [first, end) do if each runs once."""
        return sum(self.per_bundle[first:end], Work(use=(0,) * len(self.units)))

    def after(self, branch: int) -> int:
        """The address that follows a branch not taken, past its delay slots."""
        return branch + 1 + DELAY_SLOTS[self.target]

    def branch_ending(self, address: int) -> int | None:
        """Where the branch goes whose delay slots end before `address`, if there is one."""
        return self.branches.get(address - 1 - DELAY_SLOTS[self.target])

    @cached_property
    def loops(self) -> list[Loop]:
        """All loops, by their first address."""
        ends: dict[int, int] = {}
        for address, target in self.branches.items():
            if target <= address:
                ends[target] = max(ends.get(target, 0), self.after(address))
        return [Loop(self, first, end) for first, end in sorted(ends.items())]

    def innermost(self, block_bytes: int) -> Loop:
        """The innermost loop that multiplies matrices and of which one iteration can handle `block_bytes`."""
        matrix_unit = list(self.units).index("MXU")
        for loop in sorted(self.loops, key=lambda loop: -loop.depth):
            if self.work(loop.first, loop.end).use[matrix_unit] and loop.shortest(block_bytes):
                return loop
        raise ValueError(f"no loop of {self.name} for {self.target} handles {block_bytes=} an iteration")

    def utilisation(self, work: Work) -> dict[str, float]:
        """The share of each unit's slots that is taken."""
        return {
            unit: slots / (capacity * work.bundles)
            for (unit, capacity), slots in zip(self.units.items(), work.use, strict=True)
        }


def kernels(target: str, function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> list[Kernel]:
    """Compiles as `tests.compile.tpu_target.compile_for` does and returns the Pallas kernels of the program."""
    shutil.rmtree(DUMP, ignore_errors=True)
    DUMP.mkdir()
    compile_for(target, function, *shapes, donate=donate)
    found = list(_parse_all(target))
    return found


def _parse_all(target: str) -> Iterator[Kernel]:
    for listing in sorted(DUMP.glob("*-final_bundles.txt")):
        text = listing.read_text()
        entry = ENTRY.search(text)
        if "schedule-analysis" in listing.name or entry is None:
            continue
        stem = listing.name.rpartition("-")[0].rpartition("-")[0]
        (use,) = DUMP.glob(f"{glob_escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt")
        yield parse(entry[1], target, text, use.read_text())


def parse(name: str, target: str, listing: str, utilisation: str) -> Kernel:
    """A kernel from its final bundles and the table of their use, which has a line for each."""
    units, uses = _parse_utilisation(utilisation)
    starts = list(BUNDLE.finditer(listing))
    if [int(start[1] or "0", 16) for start in starts] != list(range(len(uses))):
        raise ListingError(f"{len(starts)} bundles of {name} are listed and {len(uses)} have their use counted")
    ends = [start.start() for start in starts[1:]] + [len(listing)]
    texts = [listing[start.end() : end] for start, end in zip(starts, ends, strict=True)]
    regions = {region: address for address, text in enumerate(texts) for region in REGION.findall(text)}
    # A region that is marked nowhere begins past the last bundle.
    end = len(texts)
    branches = {address: regions.get(to, end) for address, text in enumerate(texts) for to in BRANCH.findall(text)}
    one_core = "megacore core id" in texts[0] and end in branches.values()
    per_bundle = [_work(text, use, GRANULE_BYTES[target]) for text, use in zip(texts, uses, strict=True)]
    return Kernel(name, target, units, per_bundle, branches, listing.count("_spill]] %"), one_core)


def _parse_utilisation(text: str) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    heading, names, slots, _, *rows = text.strip().splitlines()
    assert heading.startswith("==")
    units = dict(zip((name.strip() for name in names.split(",")), map(int, slots.split()), strict=True))
    return units, [tuple(map(int, row.split())) for row in rows]


def _work(text: str, use: tuple[int, ...], granule_bytes: int) -> Work:
    copies = COPY.findall(text)
    return Work(
        bundles=1,
        use=use,
        copies=len(copies),
        copied=granule_bytes * sum(int(granules) for granules in copies if granules.isdecimal()),
        waited=granule_bytes * sum(map(int, WAIT.findall(text))),
        loaded=VECTOR_BYTES * len(LOAD.findall(text)),
    )
