"""Packs what the scheduler planned into the arrays that the steps take."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.engine.burst import Decode
from kvjax.engine.request import MAX_EOS
from kvjax.engine.sampling import Sampler
from kvjax.engine.scheduler import Share
from kvjax.engine.sequence import Generation, Sequence
from kvjax.engine.steps import Feed, Slots

NO_EOS = NO_TOKEN = -1


def make_feed(shares: Ordered[Share], *, rows: int, bucket: int) -> Feed:
    """The tokens of every share, packed into `bucket` places."""
    tokens = np.zeros(bucket, np.int32)
    start, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    place = 0
    for share in shares:
        sequence = share.sequence
        start[sequence.row], count[sequence.row] = place, share.count
        tokens[place : place + share.count] = sequence.tokens[sequence.computed : sequence.computed + share.count]
        place += share.count
    order = _order([share.sequence for share in shares], rows)
    return Feed(jnp.asarray(tokens), jnp.asarray(start), jnp.asarray(count), order)


def make_slots(generations: Ordered[Generation], *, rows: int, number: int) -> Slots:
    """One slot a generation, filled up with padding to `number`."""
    requests = [generation.request for generation in generations]

    def column(values: list, dtype: type, padding: int = 0) -> Array:
        return jnp.asarray(np.array(values + [padding] * (number - len(values)), dtype))

    return Slots(
        row=column([generation.row for generation in generations], np.int32, rows),
        sampler=Sampler(
            temperature=column([request.temperature for request in requests], np.float32),
            top_k=column([request.top_k for request in requests], np.int32),
            top_p=column([request.top_p for request in requests], np.float32, 1),
            seed=column([request.seed for request in requests], np.uint32),
        ),
    )


def make_decode(
    generations: Ordered[Generation], *, rows: int, number: int, steps: int, yield_early: bool, seen: int = 1
) -> Decode:
    """Where each generation of a burst stands, with its `seen` newest tokens; all have exactly one pending token."""
    history, limit = np.full((number, seen), NO_TOKEN, np.int32), np.zeros(number, np.int32)
    eos = np.full((number, MAX_EOS), NO_EOS, np.int32)
    for slot, generation in enumerate(generations):
        newest = generation.tokens[-seen:]
        history[slot, seen - len(newest) :] = newest
        limit[slot] = generation.remaining
        eos[slot, : len(generation.request.eos)] = generation.request.eos
    return Decode(
        history=jnp.asarray(history),
        limit=jnp.asarray(limit),
        eos=jnp.asarray(eos),
        order=_order(generations, rows),
        steps=jnp.asarray(steps, jnp.int32),
        yield_early=jnp.asarray(yield_early, jnp.bool_),
    )


def _order(sequences: Ordered[Sequence], rows: int) -> Array:
    """Priority of each row.  Only ranks are passed on: orders grow without end, 32 bits do not."""
    order = np.full(rows, rows, np.int32)
    for rank, sequence in enumerate(sorted(sequences, key=lambda one: one.order)):
        order[sequence.row] = rank
    return jnp.asarray(order)
