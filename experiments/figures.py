"""What every experiment writes: its figures, and what they were measured with."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from typing import Any


def write_figures(path: str, **figures: Any) -> None:
    """Writes figures as JSON, with the device, the versions and the command line before them."""
    import jax  # late: an experiment may settle its cores before XLA counts them
    import jaxlib

    measured_with = {
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "command": sys.argv,
    }
    with open(path, "w") as file:
        json.dump(measured_with | figures, file, indent=1)


def plot_bars(path: str, bars: Mapping[str, Mapping[str, float]], *, title: str, axis: str) -> None:
    """Draws horizontal bars as a PNG, one of each name for every group that it has a value for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: only pictures need it
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(group for values in bars.values() for group in values))
    thickness = 0.8 / max(1, len(bars))
    figure = Figure(figsize=(9, 1.5 + 0.25 * len(groups) * max(1, len(bars))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(bars.items()):
        places = [groups.index(group) + index * thickness for group in values]
        axes.barh(places, list(values.values()), thickness, label=name)
    axes.set_yticks([place + 0.4 - thickness / 2 for place in range(len(groups))], groups)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=axis)
    axes.legend()
    figure.savefig(path, dpi=120)
