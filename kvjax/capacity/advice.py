"""What is worth switching on for a workload, what is not, and the number that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvjax.capacity.formats import FORMATS
from kvjax.capacity.fragmentation import knee
from kvjax.capacity.plan import Plan, make_plan

MEBIBYTE = 2**20
VIRTUAL_PAGE_BYTES = 2 * MEBIBYTE
"""What a stock CUDA driver maps at once (vAttention, section 4)."""
WORTHWHILE_REPETITION = 0.1
"""Share of prompt tokens that must repeat before an index of prefixes pays for its hashing and its held pages."""
TOLERABLE_WASTE = 0.05
HOPE_OF_EVICTION = 0.2
"""Budget at which published evictions still hold their quality (H2O: 84.00 against 85.00 on COPA at 20 %)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is known of the requests and of what surrounds the device; None where it is not known.

    Attributes:
      lengths: tokens of each request; empty if there is no trace.
      prompts: prompt tokens of each request.
      shared: those of them that an earlier request had in the same places.
      concurrency: sequences wanted at once.
      network: bytes a second from a remote tier to this device.
      prefill_rate: tokens a second that this deployment computes.
      quality_evaluated: somebody measured what lossy caches do to the answers.
    """

    lengths: Sequence[int] = ()
    prompts: Sequence[int] = ()
    shared: Sequence[int] | None = None
    concurrency: int | None = None
    network: float | None = None
    prefill_rate: float | None = None
    quality_evaluated: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """One decision.

    Attributes:
      topic: what is decided.
      choice: the decision.
      reason: why, with the number.
      numbers: what it rests on.
    """

    topic: str
    choice: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def advise(plan: Plan, workload: Workload) -> tuple[Advice, ...]:
    """All decisions for a plan, in the order in which they are taken."""
    return (
        _layout(plan, workload),
        _page_size(plan),
        _prefix(workload),
        _quantisation(plan, workload),
        _eviction(plan, workload),
        _remote(plan, workload),
    )


def _repetition(workload: Workload) -> float | None:
    """Share of prompt tokens that an earlier request already had; None if nobody knows."""
    if workload.shared is None or not sum(workload.prompts):
        return None
    return sum(workload.shared) / sum(workload.prompts)


def _wanted(plan: Plan, workload: Workload) -> int:
    """Sequences wanted at once: as said, or one for each of a trace's requests up to what fits."""
    if workload.concurrency is not None:
        return workload.concurrency
    return min(len(workload.lengths), plan.max_sequences) if workload.lengths else plan.max_sequences


def _layout(plan: Plan, workload: Workload) -> Advice:
    context, mean = plan.deployment.context, plan.planned_length
    unused = 1 - mean / context
    repetition = _repetition(workload)
    paged = [group.sizes.group for group in plan.groups if group.sizes.group.paged]
    tensors = sum(len(group.tensors) * len(group.layers) for group in paged)
    granule = tensors * VIRTUAL_PAGE_BYTES
    sequence = plan.sequence_bytes(mean)
    numbers = {"unused_of_context": unused, "growth_unit_bytes": granule, "sequence_bytes": sequence}
    if not paged:
        return Advice(
            "layout", "contiguous", "nothing grows with the tokens: a fixed block a sequence is exact", numbers
        )
    if _wanted(plan, workload) == 1:
        reason = (
            f"one request at a time: its span of {context} tokens is {sequence_text(plan, context)}, and nobody else"
        )
        return Advice("layout", "contiguous", f"{reason} could use what paging would free", numbers)
    spans = all(group.window is None and group.tokens_per_entry == 1 for group in paged)
    if plan.deployment.platform == "gpu" and spans and not repetition and granule / 2 < TOLERABLE_WASTE * sequence:
        reason = (
            f"no repeated prefixes are known, and half a growth unit of {granule / MEBIBYTE:.0f} MiB is "
            f"{100 * granule / 2 / sequence:.1f} % of a sequence; contiguous kernels ran at par with paged ones there"
        )
        return Advice("layout", "virtual", reason, numbers)
    if unused > TOLERABLE_WASTE or repetition:
        shared = f", and {100 * repetition:.0f} % of prompt tokens repeat" if repetition else ""
        return Advice(
            "layout",
            "paged",
            f"spans for {context} tokens would leave {100 * unused:.0f} % of them empty{shared}",
            numbers,
        )
    return Advice(
        "layout",
        "paged",
        f"every sequence fills its context, so spans would waste only {100 * unused:.0f} %; pages still let {context} "
        "tokens be taken as they come, and prefixes be shared later",
        numbers,
    )


def sequence_text(plan: Plan, tokens: int) -> str:
    """The bytes of a sequence, for people."""
    return f"{plan.sequence_bytes(tokens) / MEBIBYTE:.0f} MiB"


def _page_size(plan: Plan) -> Advice:
    if not plan.sweep:
        return Advice("page_size", "none", "no group has pages")
    best = knee(plan.sweep)
    chosen = next((cost for cost in plan.sweep if cost.page_size == plan.page_size), best)
    numbers = {"knee": best.page_size, "knee_total": best.total, "planned_total": chosen.total}
    reason = (
        f"the knee is at {best.page_size} tokens: {100 * best.tail:.2f} % of the tokens' bytes in last pages, "
        f"{100 * best.table:.2f} % in tables, {100 * best.copy:.2f} % in copies"
    )
    if chosen.page_size != best.page_size:
        by = "as asked for" if plan.deployment.page_size else "the nearest that the kernels take"
        reason += f"; {chosen.page_size}, {by}, costs {100 * chosen.total:.2f} % in all"
    return Advice("page_size", str(plan.page_size), reason, numbers)


def _prefix(workload: Workload) -> Advice:
    repetition = _repetition(workload)
    if _single(workload):
        return Advice("prefix_index", "no", "a single request has no earlier one to share a prefix with")
    if repetition is None:
        return Advice(
            "prefix_index", "unknown", "the trace does not say what repeats: give its lines shared_prefix_tokens"
        )
    numbers = {"repetition": repetition}
    if repetition < WORTHWHILE_REPETITION:
        reason = f"{100 * repetition:.1f} % of prompt tokens repeat, below {100 * WORTHWHILE_REPETITION:.0f} %"
        return Advice("prefix_index", "no", f"{reason}: hashing and held pages would cost more than is saved", numbers)
    reason = f"{100 * repetition:.1f} % of prompt tokens repeat and would not be computed again"
    return Advice("prefix_index", "yes", reason, numbers)


def _quantisation(plan: Plan, workload: Workload) -> Advice:
    now = FORMATS[plan.deployment.kv_format]
    if now.lossy:
        checked = "its quality was evaluated" if workload.quality_evaluated else "evaluate its quality before serving"
        return Advice("quantisation", "as planned", f"the cache is planned in {now.name}: {checked}")
    wanted = workload.concurrency
    if wanted is not None and wanted <= plan.max_sequences:
        reason = f"{plan.max_sequences} sequences fit and {wanted} are wanted: fewer bytes would buy nothing but speed"
        return Advice("quantisation", "no", reason, {"max_sequences": plan.max_sequences})
    eight = make_plan(replace(plan.deployment, kv_format="fp8", page_size=plan.page_size))
    numbers = {"max_sequences": plan.max_sequences, "max_sequences_fp8": eight.max_sequences}
    gain = f"fp8 would hold {eight.max_sequences} sequences instead of {plan.max_sequences}"
    if eight.max_sequences <= plan.max_sequences:
        return Advice("quantisation", "no", f"{gain}: the memory goes elsewhere", numbers)
    if not workload.quality_evaluated:
        reason = f"{gain}, but no quality evaluation was named: measure your task first, then pass --quality-evaluated"
        return Advice("quantisation", "not yet", reason, numbers)
    return Advice("quantisation", "fp8", f"{gain}, and its quality was evaluated", numbers)


def _eviction(plan: Plan, workload: Workload) -> Advice:
    longest = min(max(workload.lengths, default=plan.deployment.context), plan.deployment.context)
    growing = plan.growth_per_token
    share = float(growing * longest) / max(1, plan.sequence_bytes(longest))
    numbers = {"growing_share": share, "max_sequences": plan.max_sequences}
    if not growing:
        return Advice("eviction", "no", "no group grows without end: windows and states evict by themselves", numbers)
    wanted = workload.concurrency or 1
    if plan.sequences_of(longest) >= wanted:
        reason = f"{plan.sequences_of(longest)} sequences of {longest} tokens fit and {wanted} is wanted"
        return Advice("eviction", "no", f"{reason}: nothing has to go", numbers)
    kept = int(HOPE_OF_EVICTION * longest)
    reason = (
        f"a budget of {100 * HOPE_OF_EVICTION:.0f} % ({kept} of {longest} tokens) would fit {plan.sequences_of(kept)}"
    )
    if not workload.quality_evaluated:
        return Advice("eviction", "not yet", f"{reason} sequences, but it forgets: evaluate your task first", numbers)
    return Advice("eviction", "yes", f"{reason} sequences, and its quality was evaluated", numbers)


def _remote(plan: Plan, workload: Workload) -> Advice:
    per_token = float(plan.bytes_per_token)
    repetition = _repetition(workload)
    if _single(workload):
        return Advice("remote_tier", "no", "a single request never comes back for its cache")
    if repetition is not None and repetition < WORTHWHILE_REPETITION:
        reason = f"{100 * repetition:.1f} % of prompt tokens repeat: what is stored would hardly be read"
        return Advice("remote_tier", "no", reason, {"repetition": repetition})
    if workload.network is None or workload.prefill_rate is None:
        known = "" if workload.prefill_rate is None else f", here {per_token * workload.prefill_rate / 1e9:.2f} GB/s"
        reason = (
            f"a token is {per_token:.0f} B on this device, so fetching beats computing only where the network brings "
            f"more than that times the prefill rate{known}: give --network and --prefill-rate"
        )
        return Advice("remote_tier", "unknown", reason, {"bytes_per_token": per_token})
    fetched = workload.network / per_token if per_token else float("inf")
    numbers = {"fetched_tokens_per_second": fetched, "computed_tokens_per_second": workload.prefill_rate}
    comparison = f"the network brings {fetched:.0f} tokens/s and prefill computes {workload.prefill_rate:.0f}"
    if fetched <= workload.prefill_rate:
        return Advice("remote_tier", "no", f"{comparison}: computing again is faster", numbers)
    reason = f"{comparison}: a fetch takes {workload.prefill_rate / fetched:.2f} of the time"
    return Advice("remote_tier", "yes", reason, numbers)


def _single(workload: Workload) -> bool:
    return len(workload.lengths) == 1 or (workload.concurrency == 1 and not workload.lengths)
