"""A plan as a picture."""

from __future__ import annotations

from pathlib import Path

from kvjax.capacity import Plan
from kvjax.capacity.fragmentation import knee
from kvjax.commands.plan_record import human


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
