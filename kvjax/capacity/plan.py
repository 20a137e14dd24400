"""A deployment worked out: what is left for the cache, how many pages that is, and how many sequences they hold.

Everything is for one device; the heaviest pipeline stage stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kvjax.architecture import CacheGroup
from kvjax.capacity.allocated import INT, table_bytes
from kvjax.capacity.deployment import Deployment
from kvjax.capacity.fragmentation import PAGE_SIZES, PageCost, knee, sweep
from kvjax.capacity.ledger import Ledger, Line, Step, transient_line, weights_line, workspace_line
from kvjax.capacity.sizes import GroupSizes, group_sizes

EXECUTABLE_BYTES = 256 * 2**20
PAGE_RECORD = 3 * INT
"""Refcount, pins and ring entry of a page."""
KERNEL_PAGE_SIZES = (16, 32, 64, 128)
"""What kvjax's decode kernels take; "auto" chooses among these."""
STAGING_PAGES = 64
"""Pages in each of two buffers between device and network."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of a plan.

    Attributes:
      sizes: its sizes on a device.
      num_pages: pages of its pool; 0 if it has no pages.
    """

    sizes: GroupSizes
    num_pages: int


@dataclass(frozen=True)
class Plan:
    """The result, for one device.

    Attributes:
      deployment: what was planned.
      groups: of the model and its draft.
      page_size: tokens a page.
      sweep: costs of all page sizes.
      max_sequences: sequences of the planned length at once, in one replica.
      planned_length: that length: the context, or the trace's mean.
      ledger: where the memory goes.
      shortfall: bytes that are missing for one sequence of `planned_length`; 0 if it fits.
    """

    deployment: Deployment
    groups: tuple[GroupPlan, ...]
    page_size: int
    sweep: tuple[PageCost, ...]
    max_sequences: int
    planned_length: int
    ledger: Ledger
    shortfall: int

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that a token adds in all groups while it is inside all windows, without padding."""
        return sum((group.sizes.bytes_per_token for group in self.groups), Fraction(0))

    @property
    def growth_per_token(self) -> Fraction:
        """Bytes that a token adds once all windows are full."""
        return sum((g.sizes.bytes_per_token for g in self.groups if g.sizes.group.window is None), Fraction(0))

    @property
    def state_bytes_per_sequence(self) -> int:
        return sum(group.sizes.state_bytes for group in self.groups)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools of pages, padding and headroom included."""
        return sum(g.num_pages * g.sizes.page_bytes(self.page_size) for g in self.groups if g.num_pages)

    @property
    def num_pages(self) -> int:
        return sum(group.num_pages for group in self.groups)

    def sequence_bytes(self, tokens: int) -> int:
        """The most bytes a sequence holds on its way to `tokens` tokens."""
        return sum(group.sizes.sequence_bytes(tokens, self.page_size) for group in self.groups)

    def sequences_of(self, tokens: int) -> int:
        """Sequences of `tokens` tokens that the device holds together, in one replica."""
        sizes = [group.sizes for group in self.groups]
        return _most_sequences(self.deployment, sizes, self.page_size, tokens)[0]


def make_plan(deployment: Deployment) -> Plan:
    """Works out a deployment.

    Raises:
      ValueError: sizes that do not go together; the message names them.
    """
    sizes = _heaviest_stage(deployment)
    page_size, costs = _choose_page_size(deployment, sizes)
    length = math.ceil(sum(deployment.typical) / len(deployment.typical))
    rows, shortfall = _most_sequences(deployment, sizes, page_size, length)
    fixed = _fixed_lines(deployment, rows=rows, sizes=sizes, page_size=page_size)
    left = deployment.hbm - sum(line.bytes for line in fixed)
    groups = _share_pages(sizes, rows, length, left, page_size, deployment)
    ledger = Ledger((*fixed, *_cache_lines(groups, rows, length, page_size, deployment)))
    return Plan(deployment, groups, page_size, costs, rows, length, ledger, shortfall)


def _most_sequences(
    deployment: Deployment, sizes: Sequence[GroupSizes], page_size: int, tokens: int
) -> tuple[int, int]:
    """(sequences of `tokens` tokens that fit together, bytes that are missing for one)."""
    # Every row also needs logits and partial results: lines that grow by as much with each.
    none, one = (
        sum(line.bytes for line in _fixed_lines(deployment, rows=number, sizes=sizes, page_size=page_size))
        for number in (0, 1)
    )
    cost = _sequence_cost(sizes, tokens, page_size, deployment) + one - none
    left = deployment.hbm - none - _tables(sizes, 0, page_size, deployment)
    return max(0, left // cost), max(0, cost - left)


def _heaviest_stage(deployment: Deployment) -> tuple[GroupSizes, ...]:
    """The groups of the pipeline stage that needs most for one sequence, the draft model's added to it."""
    model, parallel = deployment.architecture, deployment.parallel
    stages = parallel.stages(model.groups, model.num_layers)
    draft = _draft_groups(deployment)
    every = [
        group_sizes((*stage, *draft), deployment.kv_format, parallel=parallel, platform=deployment.platform)
        for stage in stages
    ]
    page = math.lcm(*(group.tokens_per_entry for group in (*model.groups, *draft)))
    return max(every, key=lambda sizes: sum(one.sequence_bytes(deployment.context, page) for one in sizes))


def _draft_groups(deployment: Deployment) -> tuple[CacheGroup, ...]:
    """The draft model's groups, told apart by name; it runs whole beside one pipeline stage."""
    if deployment.draft is None:
        return ()
    return tuple(replace(group, name=f"draft.{group.name}") for group in deployment.draft.architecture.groups)


def _choose_page_size(deployment: Deployment, sizes: Sequence[GroupSizes]) -> tuple[int, tuple[PageCost, ...]]:
    """The page size asked for, or the kernels' page next to the knee of the sweep; and the sweep.

    Only pages that hold whole entries are looked at: 128 tokens and their multiples for DeepSeek-V4.
    """
    paged = [one for one in sizes if one.group.paged]
    if not paged:
        return deployment.page_size or 1, ()
    step = math.lcm(*(one.group.tokens_per_entry for one in paged))
    per_token = sum((one.bytes_per_token for one in paged), Fraction(0))
    layers = sum(len(one.group.layers) for one in paged)
    costs = sweep(
        deployment.typical,
        bytes_per_token=float(per_token),
        copy_bytes_per_token=float(per_token / layers),
        page_sizes=[size for size in PAGE_SIZES if size % step == 0] or [step],
        copy_overhead_bytes=deployment.copy_overhead_bytes,
        exact=bool(deployment.lengths),
    )
    if deployment.page_size is not None:
        for one in paged:
            one.page_bytes(deployment.page_size)  # refuses pages of broken entries
        return deployment.page_size, costs
    candidates = [size for size in KERNEL_PAGE_SIZES if size % step == 0] or [step]
    return min(candidates, key=lambda size: abs(size - knee(costs).page_size)), costs


def _sequence_cost(sizes: Sequence[GroupSizes], length: int, page_size: int, deployment: Deployment) -> int:
    """All that one more sequence takes: pages and their records, states, its line of the tables, a page to copy on."""
    cost = 2 * INT
    for one in sizes:
        pages = one.pages(length, page_size)
        cost += one.sequence_bytes(length, page_size) + pages * PAGE_RECORD
        if one.group.paged:
            cost += one.page_bytes(page_size) + PAGE_RECORD
            cost += INT * (2 + one.pages(deployment.context, page_size))
    return cost


def _share_pages(
    sizes: Sequence[GroupSizes], rows: int, length: int, left: int, page_size: int, deployment: Deployment
) -> tuple[GroupPlan, ...]:
    """Pages of each group: windows get what `rows` rows can hold, and what remains goes to the groups that grow."""
    windows = {
        index: rows * (one.pages(length, page_size) + 1)
        for index, one in enumerate(sizes)
        if one.group.paged and one.group.window is not None
    }
    growing = [one for one in sizes if one.group.paged and one.group.window is None]
    rest = (
        left
        - rows * sum(one.state_bytes + one.exact_bytes(length) for one in sizes)
        - _tables(sizes, rows, page_size, deployment)
    )
    rest -= sum(number * (sizes[index].page_bytes(page_size) + PAGE_RECORD) for index, number in windows.items())
    each = sum(one.page_bytes(page_size) + PAGE_RECORD for one in growing)
    pages = max(0, rest // each) if growing and rows else 0
    return tuple(GroupPlan(one, windows.get(index, pages if one in growing else 0)) for index, one in enumerate(sizes))


def _tables(sizes: Sequence[GroupSizes], rows: int, page_size: int, deployment: Deployment) -> int:
    """Bytes of the tables without the records of pages."""
    widths = [one.pages(deployment.context, page_size) for one in sizes if one.group.paged]
    return sum(table_bytes(rows=rows, width=width, num_pages=0) for width in widths) + INT * (2 * rows + 3)


def _fixed_lines(deployment: Deployment, *, rows: int, sizes: Sequence[GroupSizes], page_size: int) -> list[Line]:
    """The lines that do not belong to the cache."""
    model, parallel = deployment.architecture, deployment.parallel
    lines = [weights_line(deployment.weights, model.num_layers, parallel)]
    if (draft := deployment.draft) is not None:
        whole = replace(parallel, pipeline=1)
        lines.append(weights_line(draft.weights, draft.architecture.num_layers, whole, "draft_weights"))
    if deployment.executable is not None:
        lines += deployment.executable.lines()
    else:
        step = Step(deployment.chunk, rows, scanned=deployment.scanned)
        lines.append(transient_line(model, step, parallel, lines[0].bytes))
        source = "assumption: code, constants and the driver's context"
        lines.append(Line("executable", EXECUTABLE_BYTES, "256 MiB", source))
    lines.append(workspace_line(model, rows, parallel))
    slack = math.ceil(deployment.hbm * deployment.slack)
    formula = f"{100 * deployment.slack:g} % of {deployment.hbm} B"
    lines.append(Line("allocator_slack", slack, formula, "assumption: --slack"))
    staging = 2 * STAGING_PAGES * sum(one.page_bytes(page_size) for one in sizes if one.group.paged)
    if deployment.staging:
        formula = f"2 buffers × {STAGING_PAGES} pages of every group"
        lines.append(Line("transfer_staging", staging, formula, "assumption: --network"))
    else:
        lines.append(Line("transfer_staging", 0, "no remote tier", "--network not given"))
    return lines


def _cache_lines(
    groups: Sequence[GroupPlan], rows: int, length: int, page_size: int, deployment: Deployment
) -> list[Line]:
    """The lines of the cache."""
    paged = [group for group in groups if group.num_pages]
    whole = sum(group.num_pages * group.sizes.page_bytes(page_size) for group in paged)
    headroom = sum(min(rows, group.num_pages) * group.sizes.page_bytes(page_size) for group in paged)
    usable = whole - headroom
    padding = sum(
        int(
            (group.num_pages - min(rows, group.num_pages))
            * group.sizes.page_bytes(page_size)
            * (1 - 1 / group.sizes.padding)
        )
        for group in paged
    )
    states = rows * sum(one.sizes.state_bytes + one.sizes.exact_bytes(length) for one in groups)
    sizes = [group.sizes for group in groups]
    tables = _tables(sizes, rows, page_size, deployment) + PAGE_RECORD * sum(group.num_pages for group in groups)
    pages = " + ".join(f"{g.num_pages} × {g.sizes.page_bytes(page_size)} B ({g.sizes.group.name})" for g in paged)
    lanes = paged[0].sizes.lane_multiple if paged else 1
    return [
        Line("kv_pool", usable - padding, f"{pages or 'no pages'}, less the two lines below", "what is left of --hbm"),
        Line("alignment_padding", padding, f"rows padded to multiples of {lanes} lanes", "kvjax.layout"),
        Line("copy_on_write_headroom", headroom, f"one page of every group for each of {rows} rows", "--page-size"),
        Line("states", states, f"{rows} rows × states, rings and exact tokens", "config"),
        Line("page_tables", tables, f"4 B × {rows} rows × pages of a context + 12 B a page", "kvjax.pages"),
    ]
