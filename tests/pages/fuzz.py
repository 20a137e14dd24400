"""The long run of the model test: `make fuzz`, or python -m tests.pages.fuzz [--transitions N] [--seed S] [--steps K].

Each round drives one of a small fixed set of tables (so that nothing recompiles) from empty through `steps` operations,
and compares with the plain Python model after each.  One transition is one row's part in one operation: a row that was
asked to do something, or a page id that was named; rows an operation leaves alone do not count.  A failure names the
setting and the seed that reproduce it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

from tests.pages.harness import OPERATIONS, SETTINGS
from tests.pages.walk import RandomWalk


def fuzz(transitions: int, seed: int, steps: int) -> tuple[Counter[str], int, int]:
    """(how often each operation and each status of it was met, transitions, the seed after the last).

    AssertionError names what reproduces a failure.
    """
    counts, done, names = Counter[str](), 0, list(SETTINGS)
    with tqdm(total=transitions, unit="transition", file=sys.stderr, mininterval=10) as bar:
        while done < transitions:
            name = names[seed % len(names)]
            walk = RandomWalk(name, seed)
            for step in range(steps):
                try:
                    walk.step()
                except AssertionError as failure:
                    raise AssertionError(f"setting {name!r}, seed {seed}, step {step}: {failure}") from failure
            counts += walk.harness.counts
            done += walk.harness.transitions
            bar.update(walk.harness.transitions)
            seed += 1
    return counts, done, seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=1_000_000, help="at least this many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next counts up (default: 0)")
    parser.add_argument("--steps", type=int, default=1000, help="operations a round (default: %(default)s)")
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        counts, done, end = fuzz(options.transitions, options.seed, options.steps)
    except AssertionError as failure:
        print(f"FAILED after {time.perf_counter() - start:.0f} s: {failure}")
        return 1
    for name, count in sorted(counts.items()):
        print(f"{name:28s} {count:>9,}")
    operations = sum(counts[name] for name in OPERATIONS)
    print(
        f"{done:,} transitions in {operations:,} operations of {end - options.seed} rounds, seeds {options.seed} to "
        f"{end - 1}, {time.perf_counter() - start:.0f} s: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
