"""Do conversions between layouts stay within the memory they report?  Compiles each, to and from kvjax's own layout.

    python -m tests.compile.layouts cpu | tpu | gpu

In place: the whole pool is aliased, and temporaries are a few slabs.  Streamed: arguments, results and temporaries are
at most the reported peak.  The last case transposes a pool at once, which the gate must refuse.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from kvjax.layout import LAYOUTS, Layout, make_layout
from kvjax.spec import CacheSpec
from kvjax.storage.convert import Conversion, convert_planned, plan_conversion
from tests.compile.in_place import compile_on_cpu

GROUP = CacheSpec.uniform(layers=4, kv_heads=8, head_dim=128).groups[0]
NUM_PAGES, PAGE_SIZE = 1024, 16
PLATFORMS = {"cpu": "cpu", "h200": "gpu", "v6e": "tpu"}

Compile = Callable[..., jax.stages.Compiled]


def layout(name: str) -> Layout:
    return make_layout(name, GROUP, num_pages=NUM_PAGES, page_size=PAGE_SIZE)


def check(plan: Conversion, function: Callable, compile_for: Compile) -> tuple[bool, str]:
    """(within what it reports, a line that says so) for one conversion."""
    pool = {array.name: jax.ShapeDtypeStruct(plan.source.shape(array), array.dtype) for array in plan.source.arrays}
    memory = compile_for(function, pool, donate=(0,) if plan.in_place else ()).memory_analysis()
    alias, temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + temporaries - alias
    good = peak <= plan.peak_bytes and (alias >= plan.source.nbytes or not plan.in_place)
    kind = "in place" if plan.in_place else "streamed"
    return good, f"{kind} peak {peak:>11,} B of {plan.peak_bytes:>11,} B, temporaries {temporaries:>10,} B"


def run(name: str, compile_for: Compile) -> int:
    """Checks all conversions, prints a line each, and returns the number of failures."""
    failed = 0
    plan_for = partial(plan_conversion, platform=PLATFORMS[name])
    for other in LAYOUTS:
        for source, target in {("kvjax", other): None, (other, "kvjax"): None}:
            plan = plan_for(layout(source), layout(target))
            good, line = check(plan, partial(convert_planned, plan=plan), compile_for)
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {name:4s} {source:>19s} → {target:19s} {line}", flush=True)
    plan = plan_for(layout("flashinfer_hnd"), layout("flashinfer_nhd"))
    good, line = check(plan, _at_once, compile_for)
    failed += good
    print(f"{'FAIL' if good else 'ok  '} {name:4s} {'transposed at once':41s} {line} (broken on purpose)")
    print(f"{failed} failed")
    return failed


def _at_once(pool: dict[str, Any]) -> dict[str, Any]:
    """Both arrays live, and XLA may add a third."""
    turned = pool["kv"].swapaxes(3, 4)
    return {"kv": turned, "before": pool["kv"] * 1}


def main(target: str) -> int:
    if target == "cpu":
        return run("cpu", compile_on_cpu)
    if target == "tpu":
        from tests.compile import tpu_target

        return run("v6e", partial(tpu_target.compile_for, "v6e"))
    if target == "gpu":
        from tests.compile import gpu_target

        return run("h200", partial(gpu_target.compile_for, "h200"))
    raise SystemExit(f"target {target!r} is unknown; use cpu, tpu or gpu")


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
