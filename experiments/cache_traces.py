"""Requests of real length distributions come and go: what a paged, a virtual and a contiguous cache hold meanwhile.

The virtual space is real, its memory is mapped; only the device's work is left out, and counted as longer than the
mapping beside it (each turn waits for the background thread).  What pages and spans hold for the same rows at the same
time is arithmetic.  Waste is what rows need and do not use: the rest of their last page-group.  What is mapped beyond
need, for the next request or ahead of time, is counted apart: it is given up when a row wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.cache_steps import PAGE_TOKENS, SPEC
from kvjax.pages import Status
from kvjax.virtual import VirtualSpace

ROWS, CONTEXT, BURST = 16, 8192, 16
POOL_BYTES = 512 << 20
PREFIX_TOKENS = 500


@dataclass(frozen=True)
class Lengths:
    """A distribution of requests: log-normal prompts and outputs, (median, sigma) of each; several are mixed evenly."""

    name: str
    prompts: tuple[tuple[float, float], ...]
    outputs: tuple[tuple[float, float], ...]

    def draw(self, random: np.random.Generator) -> tuple[int, int]:
        kind = random.integers(len(self.prompts))
        drawn = (random.lognormal(np.log(each[kind][0]), each[kind][1]) for each in (self.prompts, self.outputs))
        prompt, output = (int(np.ceil(value)) for value in drawn)
        prompt = min(prompt, CONTEXT - PREFIX_TOKENS - 1024)
        return prompt, min(output, 1024)


CHATS, DOCUMENTS = ((60.0, 1.0), (180.0, 0.8)), ((4000.0, 0.4), (250.0, 0.6))
LENGTHS = (
    Lengths("short chats", CHATS[:1], CHATS[1:]),
    Lengths("long documents", DOCUMENTS[:1], DOCUMENTS[1:]),
    Lengths("mixed", (CHATS[0], DOCUMENTS[0]), (CHATS[1], DOCUMENTS[1])),
)


def trace(lengths: Lengths, *, prefix: int, turns: int) -> Iterator[dict[int, int]]:
    """Tokens of every live request after each turn, by its number.

    A turn lets those leave that are done, lengthens the rest by a burst and fills the free rows with new requests,
    which all begin with `prefix` tokens.
    """
    random, number = np.random.default_rng(0), count()
    live: dict[int, tuple[int, int]] = {}
    for _ in range(turns):
        live = {one: (min(now + BURST, end), end) for one, (now, end) in live.items() if now < end}
        while len(live) < ROWS:
            prompt, output = lengths.draw(random)
            live[next(number)] = (prefix + prompt, prefix + prompt + output)
        yield {one: now for one, (now, _) in live.items()}


def follow(lengths: Lengths, *, page_group_bytes: int, shared: bool, turns: int) -> dict[str, Any]:
    """Serves one trace for `turns` bursts; what each cache held after each, and what the mapping cost.

    The requests all have the shared prefix, or none has.
    """
    space = VirtualSpace(
        SPEC,
        rows=ROWS + 1,
        num_pages=POOL_BYTES // page_group_bytes,
        max_context=CONTEXT,
        page_group_bytes=page_group_bytes,
        lookahead=BURST,
    )
    prefix = PREFIX_TOKENS if shared else 0
    holder = _fill_prefix(space, prefix) if shared else None
    series: dict[str, list[float]] = {"useful": [], "virtual": [], "mapped": [], "paged": [], "contiguous": []}
    rows: dict[int, int] = {}
    tokens = 0
    for live in trace(lengths, prefix=prefix, turns=turns):
        for gone in rows.keys() - live.keys():
            space.release(rows.pop(gone))
        for new in live.keys() - rows.keys():
            admitted = space.admit(live[new], shared=prefix)
            assert admitted is not None
            if holder is not None and space.alias(holder, admitted, prefix) != Status.OK:
                raise RuntimeError("the prefix could not be shared")
            rows[new] = admitted
        wanted = np.zeros(ROWS + 1, np.int64)
        for request, row in rows.items():
            wanted[row] = live[request]
        before = int(space.length.sum())
        status = space.step(wanted)
        if np.any(status):
            raise RuntimeError(f"the pool of {POOL_BYTES >> 20} MiB is too small: {status}; raise POOL_BYTES")
        space.follow(jnp.int32(0))
        space.commit()
        space.settle()
        tokens += int(space.length.sum()) - before
        _record(series, space, list(live.values()), prefix)
    counters = space.figures().counters
    space.close()
    calls = counters.map_calls + counters.unmap_calls
    return {
        "lengths": lengths.name,
        "shared_prefix": shared,
        "page_group_bytes": page_group_bytes,
        "page_group_tokens": space.layout.page_tokens,
        "tokens": tokens,
        "calls_per_1000_tokens": 1000 * calls / tokens,
        "microseconds_per_call": 1e6 * counters.map_seconds / calls,
        "mapping_ahead": counters.ahead_seconds / counters.map_seconds,
        "stalled_turns": counters.stalls,
        "copies": counters.copies,
        "reused_pages": counters.reused_pages,
        "fragmentation": {name: _fragmentation(series, name) for name in ("paged", "virtual", "contiguous")},
        "mapped_to_useful": sum(series["mapped"]) / sum(series["useful"]),
        "series": series,
    }


def _fill_prefix(space: VirtualSpace, tokens: int) -> int:
    row = space.admit(tokens)
    assert row is not None
    wanted = np.zeros(ROWS + 1, np.int64)
    wanted[row] = tokens
    space.step(wanted)
    space.follow(jnp.int32(0))
    space.commit()
    space.settle()
    return row


def _record(series: dict[str, list[float]], space: VirtualSpace, lengths: list[int], prefix: int) -> None:
    """Bytes after a turn.  A shared prefix is held once, in a row of its own; a partly filled last page, once a row."""
    token, figures = SPEC.bytes_per_token, space.figures()
    whole = prefix // PAGE_TOKENS
    pages = sum(-(-length // PAGE_TOKENS) - whole for length in lengths) + -(-prefix // PAGE_TOKENS)
    series["useful"].append(token * (sum(length - prefix for length in lengths) + prefix))
    # What rows of earlier requests left mapped, and what is mapped ahead, is given up when somebody needs it.
    series["virtual"].append(POOL_BYTES - space.available * space.layout.page_bytes)
    series["mapped"].append(figures.held_bytes + figures.parked_bytes)
    series["paged"].append(token * PAGE_TOKENS * pages)
    series["contiguous"].append(token * CONTEXT * ROWS)


def _fragmentation(series: dict[str, list[float]], name: str) -> float:
    """The part of what is held that is of no use, over all turns."""
    return 1 - sum(series["useful"]) / sum(series[name])
