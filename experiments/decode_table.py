"""What the decode sweep prints and draws of its records."""

from __future__ import annotations

from typing import Any

from experiments.decode_cases import Batch
from experiments.figures import plot_bars

FA3_8x32K_ON_H200 = 253.5e-6
"""Seconds of a layer of FlashAttention 3 with pages at 8 × 32K on an H200: the mark to beat."""

Record = dict[str, Any]
"""What is known of one kernel on one batch: as it stands in the JSON."""


def lines(records: list[Record], *, timed: bool) -> list[str]:
    """The table."""
    heading = f"{'batch':22s} {'page':>4s} {'kernel':30s} {'error':>8s}"
    if timed:
        heading += (
            f" {'µs':>9s} {'fastest – slowest':>19s} {'compile s':>9s} {'needed GB':>9s} {'GB/s':>7s} "
            f"{'of read':>7s} {'of copy':>7s}"
        )
    table = [heading]
    for record in records:
        start = f"{record['batch']:22s} {record['page'] or '':>4} {record['kernel']:30s}"
        if "refused" in record:
            table.append(f"{start} {record['refused']}")
            continue
        line = f"{start} {record['error']:>8.1e}{'' if record['right'] else ' WRONG'}"
        if timed:
            spread = f"{record['fastest'] * 1e6:,.1f} – {record['slowest'] * 1e6:,.1f}"
            line += (
                f" {record['seconds'] * 1e6:>9,.1f} {spread:>19s} {record['compile_seconds']:>9.1f} "
                f"{record['needed_bytes'] / 1e9:>9.3f} {record['bytes_per_second'] / 1e9:>7,.0f} "
                f"{record['share_of_read']:>7.1%} {record['share_of_copy']:>7.1%}"
            )
        table.append(line)
    return table


def findings(records: list[Record], batches: list[Batch], device_kind: str) -> list[str]:
    """What the table is read for: the device's own speed, the balance of work, the mark."""
    by_bytes = {r["needed_bytes"]: r for r in records if "needed_bytes" in r}
    found = [
        f"the device at {size / 1e9:.3f} GB: reads {record['read_bandwidth'] / 1e9:,.0f} GB/s, "
        f"copies {record['copy_bandwidth'] / 1e9:,.0f} GB/s (read + written)"
        for size, record in by_bytes.items()
    ]
    ours = {(r["batch"], r["page"]): r["seconds"] for r in records if r["kernel"] == "kvjax" and "seconds" in r}
    long_row, balanced = (batch.name for batch in batches[-2:])
    for batch, page in ours:
        if batch == long_row and (balanced, page) in ours:
            ratio = ours[batch, page] / ours[balanced, page]
            found.append(f"page {page}: {long_row} takes {ratio:.2f} × the time of {balanced}")
        if batch == "8 × 32,768" and "H200" in device_kind:
            ratio = ours[batch, page] / FA3_8x32K_ON_H200
            mark = f"FA3's {FA3_8x32K_ON_H200 * 1e6:.1f} µs on an H200"
            found.append(f"page {page}: {batch} takes {ratio:.2f} × {mark}")
    return found


def plot_shares(path: str, records: list[Record], device_kind: str) -> None:
    """A bar a kernel, in groups of one batch and page size."""
    bars: dict[str, dict[str, float]] = {}
    for record in records:
        if "share_of_read" in record:
            group = record["batch"] + (f", page {record['page']}" if record["page"] else "")
            bars.setdefault(record["kernel"], {})[group] = record["share_of_read"]
    plot_bars(path, bars, title=f"Paged decode on {device_kind}", axis="share of the device's read bandwidth")
