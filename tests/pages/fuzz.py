"""The long run of the model test: `make fuzz`, or python -m tests.pages.fuzz [--transitions N] [--seed S] [--steps K].

Each round drives one of a small fixed set of table shapes (so that nothing recompiles) from an empty table through
`steps` operations, and compares with the plain Python model after each.  One transition is one row's part in one
operation.  A failure names the shape and the seed that reproduce it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

from tests.pages.model import Harness, jitted
from tests.pages.test_against_model import SHAPES

ROWS = 5


def fuzz(transitions: int, seed: int, steps: int) -> Counter[str]:
    """How often each operation, and each status of it, was met.  AssertionError names what reproduces a failure."""
    operations, counts = jitted(), Counter[str]()
    with tqdm(total=transitions, unit="transition", file=sys.stderr) as bar:
        round_seed = seed
        while bar.n < transitions:
            name = list(SHAPES)[round_seed % len(SHAPES)]
            harness = Harness(SHAPES[name], rows=ROWS, seed=round_seed, operations=operations)
            for step in range(steps):
                try:
                    harness.step()
                except AssertionError as failure:
                    raise AssertionError(f"shape {name!r}, seed {round_seed}, step {step}: {failure}") from failure
                bar.update(ROWS)
            counts += harness.counts
            round_seed += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="at least this many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next counts up (default: 0)")
    parser.add_argument("--steps", type=int, default=500, help="operations a round (default: %(default)s)")
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        counts = fuzz(options.transitions, options.seed, options.steps)
    except AssertionError as failure:
        print(f"FAILED after {time.perf_counter() - start:.0f} s: {failure}")
        return 1
    for name, count in sorted(counts.items()):
        print(f"{name:28s} {count:>9,}")
    operations = sum(count for name, count in counts.items() if ":" not in name and name != "copies")
    rounds = operations // options.steps
    print(
        f"{operations * ROWS:,} transitions in {operations:,} operations of {rounds} rounds, seeds {options.seed} to "
        f"{options.seed + rounds - 1}, {time.perf_counter() - start:.0f} s: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
