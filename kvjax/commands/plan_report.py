"""A plan for people, for programs, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvjax.capacity import Advice, GroupPlan, Plan, expected_waste, utilisation, worst_waste
from kvjax.capacity.fragmentation import knee
from kvjax.capacity.ledger import bars

LENGTHS = (1024, 4096, 8192, 32768, 131072, 1048576)


def record(plan: Plan, advice: Sequence[Advice]) -> dict[str, Any]:
    """The plan as JSON values.  Bytes are of one device; `max_sequences` is of one replica."""
    deployment = plan.deployment
    return {
        "model_type": deployment.architecture.model_type,
        "scope": "one device; sequences of one replica",
        "context": deployment.context,
        "planned_length": plan.planned_length,
        "kv_format": deployment.kv_format,
        "bytes_per_token": _number(plan.bytes_per_token),
        "bytes_per_token_beyond_windows": _number(plan.growth_per_token),
        "state_bytes_per_sequence": plan.state_bytes_per_sequence,
        "pool_bytes": plan.pool_bytes,
        "num_pages": plan.num_pages,
        "page_size": plan.page_size,
        "max_sequences": plan.max_sequences,
        "max_sequences_all_replicas": plan.max_sequences * deployment.parallel.data,
        "devices": deployment.parallel.devices,
        "sequences_of": {str(length): plan.sequences_of(length) for length in _lengths(plan)},
        "limit": limit(plan),
        "shortfall_bytes": plan.shortfall,
        "hbm_bytes": deployment.hbm,
        "ledger": [
            {"name": line.name, "bytes": line.bytes, "formula": line.formula, "source": line.source}
            for line in plan.ledger.lines
        ],
        "groups": [_group(group, plan) for group in plan.groups],
        "page_sizes": [
            {
                "page_size": cost.page_size,
                "tail": cost.tail,
                "table": cost.table,
                "copy": cost.copy,
                "total": cost.total,
                "utilisation": cost.utilisation,
                "kernel_efficiency": cost.kernel_efficiency,
                "pages_per_token": cost.pages_per_token,
                "knee": cost.page_size == knee(plan.sweep).page_size,
            }
            for cost in plan.sweep
        ],
        "fields": [
            {"field": use.field, "value": use.value, "use": use.use, "given": use.given}
            for use in deployment.architecture.uses
        ],
        **({"advice": [_advice(one) for one in advice]} if advice else {}),
    }


def report(plan: Plan, advice: Sequence[Advice], *, title: str) -> str:
    """The plan as text."""
    deployment, lengths = plan.deployment, plan.deployment.typical
    parallel = deployment.parallel
    sections = [
        f"{title}: {deployment.architecture.model_type}, {deployment.architecture.num_layers} layers, cache in "
        f"{deployment.kv_format}, contexts to {deployment.context} tokens, {parallel.devices} device"
        f"{'s' if parallel.devices > 1 else ''} of {human(deployment.hbm)} (tp {parallel.tensor}, cp {parallel.context}, "
        f"pp {parallel.pipeline}, dp {parallel.data}).  Figures are for one device.",
        _groups_table(plan),
        "\n".join(
            (
                f"bytes a token            {_number(plan.bytes_per_token)} B"
                f" ({_number(plan.growth_per_token)} B once all windows are full)",
                f"state bytes a sequence   {human(plan.state_bytes_per_sequence)}",
                f"pool                     {human(plan.pool_bytes)}: {plan.num_pages} pages of {plan.page_size} tokens",
                f"fragmentation            at {len(lengths)} length{'s' if len(lengths) > 1 else ''}: "
                f"{100 * utilisation(lengths, plan.page_size):.2f} % of held positions used; "
                f"E[F] {expected_waste(plan.max_sequences, plan.page_size):.0f} and F_max "
                f"{worst_waste(plan.max_sequences, plan.page_size)} positions at {plan.max_sequences} sequences",
                f"max sequences            {plan.max_sequences} of {plan.planned_length} tokens a replica"
                + (f", {plan.max_sequences * parallel.data} in all" if parallel.data > 1 else ""),
                *(f"{'':24} {plan.sequences_of(length)} of {length} tokens" for length in _lengths(plan)),
                f"limit                    {limit(plan)}",
            )
        ),
        _ledger_table(plan),
        "\n".join(bars(plan.ledger.lines, max(deployment.hbm, plan.ledger.total))),
    ]
    if plan.sweep:
        sections.append(_sweep_table(plan))
    if advice:
        sections.append("\n".join(f"{one.topic}: {one.choice}. {one.reason}." for one in advice))
    uses = deployment.architecture.uses
    sections.append(
        "fields read\n"
        + table(
            [
                [
                    "  " + use.field,
                    _shown(use.value),
                    use.use + ("" if use.given else " (not given: the family's default)"),
                ]
                for use in uses
                if use.given or use.value is not None
            ]
        )
    )
    return "\n\n".join(sections)


def limit(plan: Plan) -> str:
    """What keeps the plan from holding more."""
    if not plan.max_sequences:
        rest = plan.deployment.hbm - plan.ledger.total
        largest = max(plan.ledger.lines, key=lambda line: line.bytes)
        return (
            f"memory: one sequence of {plan.planned_length} tokens needs {human(plan.shortfall)} more "
            f"({human(max(0, rest))} left; {largest.name} takes {human(largest.bytes)})"
        )
    sizes = {
        group.sizes.group.name: group.sizes.sequence_bytes(plan.planned_length, plan.page_size) for group in plan.groups
    }
    name = max(sizes, key=lambda one: sizes[one])
    share = 100 * sizes[name] / max(1, sum(sizes.values()))
    return f"{name} layers: {share:.0f} % of the {human(sum(sizes.values()))} of a sequence of {plan.planned_length} tokens"


def draw(plan: Plan, path: str | Path, *, title: str) -> None:
    """Writes a PNG: the ledger as a bar, and the costs of page sizes with the knee marked.

    Raises:
      RuntimeError: matplotlib is not installed.
      OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("the picture needs matplotlib: pip install 'kvjax[plots]'") from error
    figure = Figure(figsize=(11, 6), layout="constrained")
    memory, pages = figure.subplots(2, 1, height_ratios=(1, 2))
    start = 0.0
    for line in plan.ledger.lines:
        if line.bytes:
            memory.barh([0], [line.bytes / 2**30], left=start, label=f"{line.name} {human(line.bytes)}")
            start += line.bytes / 2**30
    memory.axvline(plan.deployment.hbm / 2**30, color="black", linestyle="--")
    memory.set(yticks=[], xlabel="GiB of one device", title=title)
    memory.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    if plan.sweep:
        sizes = [cost.page_size for cost in plan.sweep]
        for name in ("tail", "table", "copy", "total"):
            pages.plot(sizes, [100 * getattr(cost, name) for cost in plan.sweep], marker="o", label=name)
        best = knee(plan.sweep)
        pages.annotate("knee", (best.page_size, 100 * best.total), (0, 20), textcoords="offset points", ha="center")
        pages.set(xscale="log", yscale="log", xlabel="tokens a page", ylabel="% of the tokens' bytes", xticks=sizes)
        pages.set_xticks(sizes, [str(size) for size in sizes])
        pages.legend()
    else:
        pages.set_axis_off()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))


def human(number: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def table(lines: Iterable[Sequence[str]]) -> str:
    """Aligned columns, the last one ragged."""
    lines = [list(line) for line in lines]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _lengths(plan: Plan) -> list[int]:
    """Lengths to count sequences of: round ones up to the context, and the context."""
    context = plan.deployment.context
    return sorted({*(length for length in LENGTHS if length < context), context})


def _group(group: GroupPlan, plan: Plan) -> dict[str, Any]:
    sizes = group.sizes
    return {
        "name": sizes.group.name,
        "mechanism": sizes.group.mechanism,
        "layers": len(sizes.group.layers),
        "window": sizes.group.window,
        "tokens_per_entry": sizes.group.tokens_per_entry,
        "tensors": [{"name": t.name, "heads": t.heads, "width": t.width} for t in sizes.group.tensors],
        "states": [{"name": s.name, "shape": list(s.shape), "dtype": s.dtype} for s in sizes.group.states],
        "entry_bytes": _number(sizes.entry_bytes),
        "bytes_per_token": _number(sizes.bytes_per_token),
        "state_bytes_per_sequence": sizes.state_bytes,
        "page_bytes": sizes.page_bytes(plan.page_size) if sizes.group.paged else 0,
        "num_pages": group.num_pages,
    }


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
                str(_number(sizes.entry_bytes)),
                str(_number(sizes.bytes_per_token)),
                human(sizes.state_bytes),
                str(group.num_pages),
            ]
        )
    return table(lines)


def _ledger_table(plan: Plan) -> str:
    lines = [["ledger", "bytes", "", "formula", "source"]]
    lines += [[line.name, str(line.bytes), human(line.bytes), line.formula, line.source] for line in plan.ledger.lines]
    rest = plan.deployment.hbm - plan.ledger.total
    lines.append(["total", str(plan.ledger.total), human(plan.ledger.total), f"{rest} B of --hbm left", ""])
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


def _advice(one: Advice) -> dict[str, Any]:
    return {"topic": one.topic, "choice": one.choice, "reason": one.reason, "numbers": dict(one.numbers)}


def _number(value: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(value) if value.denominator == 1 else float(value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "…"
