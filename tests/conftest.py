"""What test modules leave behind is dropped when it is much; the end of a run counts the contract cases."""

import gc
from collections import Counter
from pathlib import Path

import jax
import pytest

CONTRACT = "keeps_the_contract"  # in the name of every test that holds a backend to it


MAPS = Path("/proc/self/maps")  # a line for each memory area
MANY_AREAS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_are_dropped():
    """Each compiled program keeps memory areas of the process, of which Linux allows 65,530: then compiling aborts."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_AREAS:
        jax.clear_caches()
        gc.collect()


def pytest_terminal_summary(terminalreporter):
    """How many cases of the kernels' contract each backend was held to."""
    for outcome in ("passed", "failed", "skipped"):
        cases = [
            report.nodeid
            for report in terminalreporter.stats.get(outcome, [])
            if CONTRACT in report.nodeid and getattr(report, "when", "call") != "teardown"
        ]
        counts = Counter(Path(nodeid.split("::")[0]).stem.removeprefix("test_") for nodeid in cases)
        if counts:
            told = ", ".join(f"{backend} {number}" for backend, number in sorted(counts.items()))
            terminalreporter.write_line(f"kernel contract, cases {outcome}: {told}")
