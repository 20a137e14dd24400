"""A plan for programs, and the words and numbers that its other forms share."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvjax.capacity import Advice, GroupPlan, Plan
from kvjax.capacity.fragmentation import knee

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
        "bytes_per_token": number(plan.bytes_per_token),
        "bytes_per_token_beyond_windows": number(plan.growth_per_token),
        "state_bytes_per_sequence": plan.state_bytes_per_sequence,
        "pool_bytes": plan.pool_bytes,
        "num_pages": plan.num_pages,
        "page_size": plan.page_size,
        "max_sequences": plan.max_sequences,
        "max_sequences_all_replicas": plan.max_sequences * deployment.parallel.data,
        "devices": deployment.parallel.devices,
        "sequences_of": {str(length): plan.sequences_of(length) for length in round_lengths(plan)},
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
    whole = f"the {human(sum(sizes.values()))} of a sequence of {plan.planned_length} tokens"
    return f"{name} layers: {share:.0f} % of {whole}"


def human(number: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"


def round_lengths(plan: Plan) -> list[int]:
    """Lengths to count sequences of: round ones up to the context, and the context."""
    context = plan.deployment.context
    return sorted({*(length for length in LENGTHS if length < context), context})


def number(value: Fraction) -> int | float:
    """A whole number where it is one."""
    return int(value) if value.denominator == 1 else float(value)


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
        "entry_bytes": number(sizes.entry_bytes),
        "bytes_per_token": number(sizes.bytes_per_token),
        "state_bytes_per_sequence": sizes.state_bytes,
        "page_bytes": sizes.page_bytes(plan.page_size) if sizes.group.paged else 0,
        "num_pages": group.num_pages,
    }


def _advice(one: Advice) -> dict[str, Any]:
    return {"topic": one.topic, "choice": one.choice, "reason": one.reason, "numbers": dict(one.numbers)}
