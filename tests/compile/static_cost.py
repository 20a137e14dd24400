"""What decode kernels cost by construction, chip by chip, beside jax's own: `python -m tests.compile.static_cost`.

    python -m tests.compile.static_cost [target …] [--compilers .compilers] [--json out/static_cost.json]

No accelerator is needed: the real compilers run here, and what they made is read. TPU: the bundles of the inner loop
against the bytes that HBM delivers in as many cycles. GPU: registers, spills, shared memory, how K and V are read, and
what a multiprocessor can issue and multiply against what memory brings it. `make report` installs the compilers first.

These are bounds, not times: a bundle or an instruction is at least a cycle, copies are taken to be perfect, and stalls
of either are not in them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

TPU_TARGETS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_TARGETS = ("h100", "h200")


def child_report(target: str, compilers: Path) -> dict[str, Any]:
    """The figures of one target, from a process of its own: libtpu and the CUDA plugin do not share one."""
    kind, folder = ("tpu", "tpu") if target in TPU_TARGETS else ("gpu", "cuda")
    paths = [str(compilers / folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.json"
        command = [sys.executable, "-m", f"tests.compile.static_{kind}", target, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the report on {target} failed:\n{done.stderr[-4000:]}")
        return json.loads(file.read_text())


def tpu_lines(report: dict[str, Any]) -> Iterator[str]:
    """The table of one TPU."""
    chip = report["chip"]
    needed = chip["hbm_bytes_per_cycle"]
    yield (
        f"{chip['target']}, one TensorCore: clock {chip['peak_flops'] / 1e12:,.1f} TFLOP/s ÷ (2 × {chip['mxus']} × "
        f"{chip['mxu_size']}² × {chip['rows_a_cycle']} rows a cycle) = {chip['hertz'] / 1e9:.3f} GHz; "
        f"HBM {chip['hbm_bytes_per_second'] / 1e9:,.0f} GB/s = {needed:,.0f} bytes a cycle"
    )
    yield (
        f"  {'shape':18s} {'kernel':30s} {'copies':>6s} {'bundles':>7s} {'KV bytes':>9s} {'B/bundle':>8s} "
        f"{'all ways':>8s} {'a run':>5s} "
        f"{'MXU':>4s} {'VALU':>4s} {'load':>4s} {'store':>5s} {'scalar':>6s} {'spills':>6s} "
        f"{'page: copy':>10s} {'compute':>7s}  memory-bound by construction"
    )
    for record in report["loops"]:
        start = f"  {record['shape']:18s} {record['subject']:30s}"
        if "refused" in record:
            yield f"{start} refused: {record['refused'][:110]}"
            continue
        units = record["units"]
        share = record["share_of_hbm"]
        verdict = "yes" if record["memory_bound"] else f"no: {share:.1%} of what HBM brings"
        verdict += ", on one core of two" if record["one_core"] else ""
        longest, a_run = record["bytes_per_bundle_longest"], record["bundles_of_a_run"]
        yield (
            f"{start} {record['copies'] or '–':>6} {record['bundles']:>7,} {record['block_bytes']:>9,} "
            f"{record['bytes_per_bundle']:>8,.0f} {f'{longest:,.0f}' if longest else '–':>8} {a_run or '–':>5} "
            f"{units['MXU']:>4.0%} {units['VALU']:>4.0%} "
            f"{units['VLOAD']:>4.0%} {units['VSTORE']:>5.0%} {units['SALU']:>6.0%} {record['vector_spills']:>6,} "
            f"{record['copy_cycles_per_page']:>10,.0f} {record['compute_cycles_per_page']:>7,.0f}  {verdict}"
        )
    for record in report["million"]:
        verdict = "compiles" if record["refused"] is None else f"refused: {record['refused'][:110]}"
        yield f"  {record['shape']}: {record['subject']}: {verdict}"


def gpu_lines(report: dict[str, Any]) -> Iterator[str]:
    """The table of one GPU."""
    yield (
        f"{report['kernels'][0]['target']}   {'shape':18s} {'regs':>4s} {'spills':>6s} {'threads':>7s} {'shared':>8s} "
        f"{'blocks by regs/shared/threads':>29s} {'bulk':>5s} {'16 B':>5s} {'other':>5s} {'4 B':>5s} {'WGMMA':>5s} "
        f"{'in flight KiB':>13s} {'KV bytes a cycle: memory':>24s} {'issue':>6s} {'tensor':>6s}  "
        "memory-bound by construction"
    )
    for record in report["kernels"]:
        if "refused" in record:
            yield f"       {record['shape']:18s} refused: {record['refused'][:140]}"
            continue
        blocks, loads = record["thread_blocks"], record["loads"]
        in_flight = f"{record['shared_bytes_in_use'] / 1024:.0f} of {record['bytes_in_flight_needed'] / 1024:.0f}"
        held = "/".join(str(blocks[by]) for by in ("by_registers", "by_shared_memory", "by_threads"))
        yield (
            f"       {record['shape']:18s} {record['registers']:>4} {record['spill_bytes']:>6} {record['threads']:>7} "
            f"{record['shared_bytes']:>8,} {held:>29s} {loads['bulk_copies']:>5} {loads['small_copies']:>5} "
            f"{loads['other_loads']:>5} {loads['four_byte_loads']:>5} {record['wgmma']:>5} "
            f"{in_flight:>13s} "
            f"{record['memory_bytes_per_cycle']:>24.1f} {record['bytes_per_cycle_by_issue']:>6.1f} "
            f"{record['bytes_per_cycle_by_tensor_cores']:>6.1f}  {'yes' if record['memory_bound'] else 'no'}"
        )
    for record in report["others"]:
        yield f"  {record['target']} (sm_100): {record['refused'] or 'taken'}"


TPU_KEY = """\
bundles, B/bundle: the quickest iteration of the innermost loop that handles a block of K and V, its page copies started
and awaited, page by page where that is a loop. copies: how many it starts. all ways: B/bundle as if no branch were ever
skipped, which no iteration is slower than; over pages in runs that depends on the runs. a run: the bundles that each
adds to a block that lies in several. MXU … scalar: share of issue slots. copy, compute: cycles for a page.
Memory-bound: compute ≤ copy."""
GPU_KEY = """\
bulk: bulk copies (UTMALDG, UBLKCP) to shared memory; 16 B: LDGSTS; 4 B: loads of 4 bytes to registers, which page
ids and lengths are; other: of other widths: 2 are a worker's share of the work, four words at once. K and V come by
bulk copies alone if 16 B is 0 and other at most these 2. in flight: the shared memory of the thread blocks that a
multiprocessor holds, and what memory brings it in a microsecond. KV bytes a cycle of one: what memory brings; what its
schedulers can issue the loop for; what its tensor cores multiply."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TPU_TARGETS + GPU_TARGETS)}; default: all")
    parser.add_argument("--compilers", type=Path, default=Path(".compilers"), help="holds tpu/ and cuda/")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    targets = arguments.targets or TPU_TARGETS + GPU_TARGETS
    if unknown := set(targets) - set(TPU_TARGETS + GPU_TARGETS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}; choose from {', '.join(TPU_TARGETS + GPU_TARGETS)}")

    reports = {}
    for target in targets:
        reports[target] = child_report(target, arguments.compilers)
        print(*(tpu_lines if target in TPU_TARGETS else gpu_lines)(reports[target]), "", sep="\n", flush=True)
    if set(targets) & set(TPU_TARGETS):
        print(TPU_KEY)
    if set(targets) & set(GPU_TARGETS):
        print(GPU_KEY)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        made_with = {"jax": version("jax"), "jaxlib": version("jaxlib"), "command": sys.argv}
        arguments.json.write_text(json.dumps(made_with | {"reports": reports}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
