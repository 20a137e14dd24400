"""What is said at the end of a run: how many cases of the kernels' contract each backend was held to."""

from collections import Counter
from pathlib import Path

CONTRACT = "keeps_the_contract"  # in the name of every test that holds a backend to it


def pytest_terminal_summary(terminalreporter):
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
