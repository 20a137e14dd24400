"""Contract problems whose rows lie in runs of adjacent pages."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from pallas_kernels.arguments import Runs, Scales
from tests.kernels.contract import LAYER, LAYERS, UNUSED_ENTRY, Problem

WHOLE = 2**20  # a run as long as any row
BEYOND = 2  # entries past the runs of a row


def in_runs(problem: Problem, lengths: Sequence[int], *, seed: int = 0) -> Problem:
    """The same problem with every row cut into runs of `lengths` pages, in turn, at permuted places of a new pool.

    Pages that no query sees are poison, as is one before each run and whatever a last run has beyond its row. Entries
    past `num_runs` hold starts that no pool has, and ends before, behind and among those that are true; so does a run
    that is counted but lies past every position.
    """
    random = np.random.default_rng(seed)
    rows = [_cut(-(-length // problem.case.page_size), lengths) for length in problem.case.lengths]
    max_runs = max(map(len, rows)) + BEYOND
    starts = np.full((len(rows), max_runs), UNUSED_ENTRY, np.int32)
    ends = random.choice(np.array([-1, 0, 2, UNUSED_ENTRY], np.int32), starts.shape)
    num_runs = np.array([len(row) + 1 for row in rows], np.int32)

    pool_pages = sum(sum(row) + len(row) for row in rows) + 1
    source = np.full(pool_pages, len(problem.pool), np.int64)  # which page of the old pool; none, where poison is
    places = [(row, run) for row, of_row in enumerate(rows) for run in range(len(of_row))]
    at = 1
    for place in random.permutation(len(places)):
        row, run = places[place]
        starts[row, run] = at
        for page in range(sum(rows[row][:run]), sum(rows[row][: run + 1])):
            old = problem.pages[row, page] if page < problem.pages.shape[1] else UNUSED_ENTRY
            if old != UNUSED_ENTRY:
                source[at] = problem.page_offset + old
            at += 1
        at += 1
    for row, of_row in enumerate(rows):
        ends[row, : len(of_row)] = np.cumsum(of_row)
        ends[row, len(of_row)] = UNUSED_ENTRY

    scales = problem.scales
    if problem.case.quantised and problem.case.scales == "token":
        scales = Scales(*(jnp.asarray(_moved(np.asarray(pool), source, np.nan)) for pool in (scales.key, scales.value)))
    poison = -128 if problem.case.stored_dtype == np.int8 else np.nan
    return replace(
        problem,
        pool=_moved(problem.pool, source, poison),
        pages=Runs(*map(jnp.asarray, (starts, ends, num_runs))),
        page_offset=np.array(LAYER * pool_pages, np.int32),
        scales=scales,
    )


def _cut(pages: int, lengths: Sequence[int]) -> list[int]:
    """The lengths of the runs that hold so many pages."""
    runs: list[int] = []
    for length in cycle(lengths):
        if sum(runs) >= pages:
            return runs
        runs.append(pages - sum(runs) + 1 if length == WHOLE else length)
    raise ValueError(f"{lengths=}; give at least one length")


def _moved(
    pool: Shaped[np.ndarray, "total_pages ..."], source: Shaped[np.ndarray, " pages"], poison: float
) -> Shaped[np.ndarray, "new_total_pages ..."]:
    """A pool of LAYERS layers whose LAYER has the pages `source` of the old pool, and poison for those it lacks."""
    with_poison = np.concatenate([pool, np.full_like(pool[:1], poison)])
    new = np.full((LAYERS * len(source), *pool.shape[1:]), poison, pool.dtype)
    new[LAYER * len(source) : (LAYER + 1) * len(source)] = with_poison[source]
    return new
