"""A plan for people: tables and bars of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvjax.capacity import Advice, Plan, expected_waste, utilisation, worst_waste
from kvjax.capacity.fragmentation import knee
from kvjax.capacity.ledger import bars
from kvjax.commands.plan_record import human, limit, number, round_lengths


def report(plan: Plan, advice: Sequence[Advice], *, title: str) -> str:
    """The plan as text."""
    sections = [
        _header(plan, title),
        _groups_table(plan),
        _summary(plan),
        _ledger_table(plan),
        "\n".join(bars(plan.ledger.lines, max(plan.deployment.hbm, plan.ledger.total))),
    ]
    if plan.sweep:
        sections.append(_sweep_table(plan))
    if advice:
        sections.append("\n".join(f"{one.topic}: {one.choice}. {one.reason}." for one in advice))
    return "\n\n".join([*sections, _fields_table(plan)])


def table(lines: Iterable[Sequence[str]]) -> str:
    """Aligned columns, the last one ragged."""
    lines = [list(line) for line in lines]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _header(plan: Plan, title: str) -> str:
    deployment, parallel = plan.deployment, plan.deployment.parallel
    model = deployment.architecture
    return (
        f"{title}: {model.model_type}, {model.num_layers} layers, cache in {deployment.kv_format}, contexts to "
        f"{deployment.context} tokens\n{parallel.devices} × {human(deployment.hbm)} (tp {parallel.tensor}, "
        f"cp {parallel.context}, pp {parallel.pipeline}, dp {parallel.data}); figures are for one device"
    )


def _summary(plan: Plan) -> str:
    lengths, page_size, rows = plan.deployment.typical, plan.page_size, plan.max_sequences
    replicas = plan.deployment.parallel.data
    used = f"the trace uses {100 * utilisation(lengths, page_size):.2f} % of what it holds; "
    bounds = f"E[F] {expected_waste(rows, page_size):.0f}, F_max {worst_waste(rows, page_size)}"
    lines = [
        ["bytes a token", f"{number(plan.bytes_per_token)} B ({number(plan.growth_per_token)} B past all windows)"],
        ["state bytes a sequence", human(plan.state_bytes_per_sequence)],
        ["pool", f"{human(plan.pool_bytes)}: {plan.num_pages} pages of {page_size} tokens"],
        ["fragmentation", f"{used if plan.deployment.lengths else ''}{bounds} empty positions of {rows} sequences"],
        ["max sequences", f"{rows} of {plan.planned_length} tokens a replica"],
        *(["", f"{plan.sequences_of(length)} of {length} tokens"] for length in round_lengths(plan)),
        ["limit", limit(plan)],
    ]
    if replicas > 1:
        lines.insert(5, ["", f"{rows * replicas} in {replicas} replicas"])
    return table(lines)


def _groups_table(plan: Plan) -> str:
    lines = [
        ["group", "mechanism", "layers", "keeps", "B an entry and layer", "B a token", "state a sequence", "pages"]
    ]
    for group in plan.groups:
        sizes, cached = group.sizes, group.sizes.group
        keeps = (
            "a state" if not cached.tensors else "all tokens" if cached.window is None else f"{cached.window} tokens"
        )
        if cached.tokens_per_entry > 1:
            keeps = f"1 entry in {cached.tokens_per_entry}"
        lines.append(
            [
                cached.name,
                cached.mechanism,
                str(len(cached.layers)),
                keeps,
                str(number(sizes.entry_bytes)),
                str(number(sizes.bytes_per_token)),
                human(sizes.state_bytes),
                str(group.num_pages),
            ]
        )
    return table(lines)


def _ledger_table(plan: Plan) -> str:
    lines = [["ledger", "bytes", "", "formula", "source"]]
    lines += [[line.name, str(line.bytes), human(line.bytes), line.formula, line.source] for line in plan.ledger.lines]
    rest = plan.deployment.hbm - plan.ledger.total
    remains = f"{rest} B of --hbm left" if rest >= 0 else f"{-rest} B more than --hbm"
    lines.append(["total", str(plan.ledger.total), human(plan.ledger.total), remains, ""])
    return table(lines)


def _sweep_table(plan: Plan) -> str:
    best = knee(plan.sweep).page_size
    lines = [["page size", "in last pages", "tables", "copies", "total", "allocations a token", ""]]
    lines += [
        [
            str(cost.page_size),
            *(f"{100 * share:.3f} %" for share in (cost.tail, cost.table, cost.copy, cost.total)),
            f"{cost.pages_per_token:.4f}",
            " ".join(
                mark
                for mark, holds in (("knee", cost.page_size == best), ("planned", cost.page_size == plan.page_size))
                if holds
            ),
        ]
        for cost in plan.sweep
    ]
    return table(lines)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _fields_table(plan: Plan) -> str:
    read = [use for use in plan.deployment.architecture.uses if use.given or use.value is not None]
    lines = [["field", "value", "used for"]]
    lines += [
        [use.field, _shown(use.value), use.use + ("" if use.given else " (the family's default)")] for use in read
    ]
    return table(lines)
