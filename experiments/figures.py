"""What every experiment writes: its figures, and what they were measured with."""

from __future__ import annotations

import json
import platform
import sys
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
