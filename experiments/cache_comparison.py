"""Which cache when: paged, on extents, virtual and contiguous, by the time of a decode step and by what traces hold.

    python -m experiments.cache_comparison [--json out/caches.json] [--png out/caches.png]

Steps (`cache_steps`) are timed in turns on the same lengths.  Traces (`cache_traces`) follow requests with the lengths
of short chats, long documents and both, with a shared prefix and without, for each page-group size; extents hold what
pages hold, and are measured by the runs that rows fall into (`cache_extents`).  Linux, CPU; a few minutes on two
cores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from tqdm import tqdm

from experiments import cache_extents, cache_steps, cache_traces
from experiments.cache_extents import ALLOCATORS
from experiments.cache_steps import Shape, name_of
from experiments.cache_traces import BURST, LENGTHS, PAGE_TOKENS
from experiments.figures import write_figures

SHAPES = flags.DEFINE_list("shapes", ["1x256", "1x4096", "8x512", "8x4096"], "Rows and context of the timed steps.")
PAGE_GROUPS = flags.DEFINE_list("page_groups", ["64", "256", "2048"], "KiB a page-group of the virtual spaces.")
STEPS = flags.DEFINE_integer("steps", 40, "Measured decode steps of each cache.", lower_bound=1)
TURNS = flags.DEFINE_integer("turns", 80, "Bursts of each trace.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Also write the figures to this file.")
PNG = flags.DEFINE_string("png", None, "Also draw them.")


def print_steps(records: Sequence[dict[str, Any]]) -> None:
    head = ("p10 – p90", "× contig.", "map calls", "overlapped", "stalls")
    print(f"{'step':12s} {'cache':18s} {'ms':>8} {head[0]:>16} {head[1]:>9} {head[2]:>9} {head[3]:>10} {head[4]:>6}")
    for one in records:
        spread = f"{one['low']:.2f} – {one['high']:.2f}"
        mapping = ""
        if "map_calls" in one:
            mapping = f" {one['map_calls']:>9} {one['overlapped']:>10.0%} {one['stalls']:>6}"
        print(
            f"{one['rows']} × {one['context']:<8} {one['cache']:18s} {one['milliseconds']:>8.2f} {spread:>16} "
            f"{one['against_contiguous']:>9.2f}{mapping}"
        )


def print_traces(records: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n{'trace':32s} {'page-group':>20} {'wasted: virtual':>15} {'paged':>6} {'contig.':>7} "
        f"{'mapped/used':>11} {'calls/1k tokens':>15} {'µs/call':>8} {'ahead':>6} {'reused':>7}"
    )
    for one in records:
        wasted = one["fragmentation"]
        group = f"{one['page_group_bytes'] >> 10} KiB, {one['page_group_tokens']} tok."
        print(
            f"{_title(one):32s} {group:>20} {wasted['virtual']:>15.1%} {wasted['paged']:>6.1%} "
            f"{wasted['contiguous']:>7.1%} {one['mapped_to_useful']:>11.2f} {one['calls_per_1000_tokens']:>15.2f} "
            f"{one['microseconds_per_call']:>8.0f} {one['mapping_ahead']:>6.0%} {one['reused_pages']:>7}"
        )


def print_runs(records: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n{'trace':32s} {'allocator':>16} {'pages':>6} {'mapped':>7} {'pages/row':>9} {'runs/row':>8} {'most':>6} "
        f"{'compactions':>11} {'moved MiB':>9} {'runs of all rows':>16}"
    )
    for one in records:
        gain = f"{one['runs_before']:.0f} → {one['runs_after']:.0f}" if one["compactions"] else ""
        print(
            f"{_title(one):32s} {one['allocator']:>16} {one['num_pages']:>6} {one['filled']:>7.0%} "
            f"{one['pages_a_row']:>9.0f} {one['mean_runs']:>8.1f} {one['most_runs']:>6.1f} {one['compactions']:>11} "
            f"{one['moved_bytes'] / 2**20:>9.0f} {gain:>16}"
        )


def draw(
    path: str,
    steps: Sequence[dict[str, Any]],
    traces: Sequence[dict[str, Any]],
    runs: Sequence[dict[str, Any]],
) -> None:
    """Waste over time for each kind of trace; runs a row over time; the time of a step, the contiguous cache's 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 12), layout="constrained")
    above, middle, below = figure.subfigures(3, 1, squeeze=False)[:, 0]
    panels = above.subplots(1, len(LENGTHS))
    for axes, lengths in zip(panels, LENGTHS, strict=True):
        chosen = [one for one in traces if one["lengths"] == lengths.name and not one["shared_prefix"]]
        for name in ("contiguous", "paged"):
            label = name if name == "contiguous" else f"paged, {PAGE_TOKENS} tokens"
            axes.plot(_waste(chosen[0]["series"], name), label=label, linestyle="--")
        for one in chosen:
            axes.plot(_waste(one["series"], "virtual"), label=name_of(one["page_group_bytes"]))
        axes.set(title=lengths.name, xlabel=f"bursts of {BURST} tokens", ylabel="needed but not used", ylim=(0, 1))
    panels[1].legend(fontsize="small", loc="upper right")
    panels = middle.subplots(1, len(LENGTHS))
    for axes, lengths in zip(panels, LENGTHS, strict=True):
        for one in runs:
            if one["lengths"] == lengths.name and not one["shared_prefix"]:
                axes.plot(one["series"], label=one["allocator"])
        axes.set(xlabel=f"bursts of {BURST} tokens", ylabel="runs a row", ylim=(0, None))
    panels[1].legend(fontsize="small")
    axes = below.subplots()
    shapes = list(dict.fromkeys((one["rows"], one["context"]) for one in steps))
    caches = list(dict.fromkeys(one["cache"] for one in steps))
    for index, cache in enumerate(caches):
        heights = [one["against_contiguous"] for one in steps if one["cache"] == cache]
        places = [place + 0.8 * index / len(caches) for place in range(len(shapes))]
        axes.bar(places, heights, 0.75 / len(caches), align="edge", label=cache)
    axes.set_xticks([place + 0.4 for place in range(len(shapes))], [f"{rows} × {context}" for rows, context in shapes])
    axes.set(xlabel="rows × context", ylabel="time of a step, contiguous = 1")
    axes.legend(fontsize="small", ncols=len(caches))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    groups = [int(size) << 10 for size in PAGE_GROUPS.value]
    shapes = [Shape(*map(int, text.split("x"))) for text in SHAPES.value]
    settings = [(lengths, size, shared) for lengths in LENGTHS for shared in (False, True) for size in groups]
    churns = [(lengths, shared, name) for lengths in LENGTHS for shared in (False, True) for name in ALLOCATORS]
    total = len(settings) + len(churns) + len(shapes) * (3 + len(groups))
    steps, traces, runs = [], [], []
    with tqdm(total=total, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        for shape in shapes:
            steps += cache_steps.measure(shape, groups, STEPS.value, bar.update)
        for lengths, size, shared in settings:
            traces.append(cache_traces.follow(lengths, page_group_bytes=size, shared=shared, turns=TURNS.value))
            bar.update()
        for lengths, shared, allocator in churns:
            runs.append(cache_extents.churn(lengths, allocator, shared=shared, turns=TURNS.value))
            bar.update()
    print_steps(steps)
    print_traces(traces)
    print_runs(runs)
    if JSON.value:
        write_figures(JSON.value, steps=steps, traces=traces, runs=runs)
    if PNG.value:
        draw(PNG.value, steps, traces, runs)


def _title(trace: dict[str, Any]) -> str:
    return trace["lengths"] + (", shared prefix" if trace["shared_prefix"] else "")


def _waste(series: dict[str, list[float]], name: str) -> list[float]:
    return [1 - useful / held for useful, held in zip(series["useful"], series[name], strict=True)]


if __name__ == "__main__":
    app.run(main)
