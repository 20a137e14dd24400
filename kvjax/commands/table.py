"""The table that ends a demo: metrics of one or more runs, side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvjax.engine import Distribution, Metrics


def metrics_table(runs: Mapping[str, Metrics]) -> str:
    """One line a figure, one column a run."""
    columns = [_figures(metrics) for metrics in runs.values()]
    lines = [["", *runs], *([name, *(column[name] for column in columns)] for name in columns[0])]
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    text = [
        "  ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([text[0], rule, *text[1:]])


def _figures(metrics: Metrics) -> dict[str, str]:
    reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(metrics.finished.items()))
    return {
        "requests": f"{metrics.requests} ({reasons})",
        "prompt / generated tokens": f"{metrics.prompt_tokens} / {metrics.generated_tokens}",
        "tokens computed": f"{metrics.computed_tokens}",
        "time, without compilation": f"{metrics.seconds:.1f} s",
        "compilation": f"{metrics.compile_seconds:.1f} s",
        "generated tokens/s": f"{metrics.tokens_per_second:.1f}",
        "time to first token, mean / p50 / p99": _spread(metrics.ttft_seconds, 1, "s"),
        "time per output token, mean / p50 / p99": _spread(metrics.tpot_seconds, 1000, "ms"),
        "pages used at peak": f"{metrics.peak_pages} of {metrics.num_pages} (of {metrics.page_size} tokens)",
        "KV bytes used at peak": _mebibytes(metrics.kv_bytes_used),
        "KV bytes reserved at peak": _mebibytes(metrics.kv_bytes_reserved),
        "KV bytes of the pool": _mebibytes(metrics.kv_bytes_pool),
        "fragmentation": f"{100 * metrics.fragmentation:.1f} %",
        "preemptions": f"{metrics.preemptions}",
        "copies on write": f"{metrics.copies_on_write}",
        "runs of adjacent pages a row": "–" if math.isnan(metrics.mean_runs) else f"{metrics.mean_runs:.1f}",
        "compactions": f"{metrics.compactions} ({metrics.moved_pages} pages moved)",
    }


def _spread(values: Distribution, factor: float, unit: str) -> str:
    return " / ".join(f"{factor * value:.3g}" for value in (values.mean, values.p50, values.p99)) + f" {unit}"


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
