"""A random walk over the calls of a cache, next to the token ids that each row should hold.

Keys, values, queries and a side tensor of every token depend on the token alone, so a row's list of tokens says what
attention must return (a float64 softmax over just those) and what must stand in each of its slots, in every tensor and
layer.  Slots that are no committed position of a row are NaN before each step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import CacheSpec, GroupSpec, Status, TensorSpec
from kvjax.extents import CompactionLimits, plan_compaction

ROWS, LAYERS, KV_HEADS, Q_HEADS, DIM, TOKENS = 4, 2, 2, 6, 8, 16
BOUNDED = ("release", "fork", "reorder", "truncate", "adopt", "compact")
LIMITS = CompactionLimits(moves=24, entries=64, pages=128)


def fresh(name: str) -> Any:
    """A call as it is now, jitted afresh: a function patched for a test is traced, not remembered."""
    static = ("max_pages",) if name in BOUNDED else ("max_tokens",) if name == "reserve" else ()
    donate = () if name == "attend" else (0,)
    call = getattr(kvjax, name)
    return jax.jit(lambda *args, **kwargs: call(*args, **kwargs), static_argnames=static, donate_argnums=donate)


@once
def compiled() -> dict[str, Any]:
    """The calls, jitted once for all tests of a process."""
    return {name: fresh(name) for name in ("reserve", "write", "attend", "commit", "advance", *BOUNDED)}


def vectors(seed: int, heads: int) -> np.ndarray:
    """A random vector for each (layer, token id, head): K, V or Q of a token depends on the token alone."""
    return np.random.default_rng(seed).normal(size=(LAYERS, 4096, heads, DIM)).astype(np.float32)


K, V, Q = vectors(1, KV_HEADS), vectors(2, KV_HEADS), vectors(3, Q_HEADS)
SCALE = vectors(4, KV_HEADS)[..., :1]
"""The side tensor: one number for each cached head of a token, like the scale of a quantised key."""


TENSORS = {"k": K, "v": V, "scale": SCALE}


def expected_attention(layer: int, tokens: list[int], query: int) -> np.ndarray:
    k, v = (array[layer, tokens].astype(np.float64) for array in (K, V))
    q = Q[layer, query].astype(np.float64).reshape(KV_HEADS, Q_HEADS // KV_HEADS, DIM)
    logits = np.einsum("hgd,nhd->hgn", q, k) * DIM**-0.5
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("hgn,nhd->hgd", weight, v).reshape(Q_HEADS, DIM)


def poison(cache: kvjax.KVCache) -> kvjax.KVCache:
    """NaN in every slot that is no committed position of a row."""
    group = jax.tree.map(np.asarray, cache.table.groups[0])
    live = np.zeros((group.num_pages, group.page_size), bool)
    for row, length in enumerate(np.asarray(cache.table.length)):
        for position in range(length):
            live[group.pages[row, position // group.page_size], position % group.page_size] = True
    mask = jnp.asarray(np.tile(live, (LAYERS, 1)))[:, None, :, None]
    return replace(cache, pools=jax.tree.map(lambda pool: jnp.where(mask, pool, jnp.nan), cache.pools))


class CacheWalk:
    """Random calls on a cache, next to a list of token ids for each row.

    Counts the query tokens `checked`, the pages copied on write, the `transitions`: rows' parts in calls, and the
    `compactions` of extents.
    """

    def __init__(self, cache: kvjax.KVCache, seed: int, operations: dict[str, Any] | None = None) -> None:
        self.cache, self.random = cache, np.random.default_rng(seed)
        self.operations = compiled() if operations is None else operations
        self.tokens: list[list[int]] = [[] for _ in range(ROWS)]
        self.next, self.checked, self.copies, self.transitions, self.compactions = 0, 0, 0, 0, 0
        self.moves = ["fork", "reorder", "truncate", "release", "adopt", "none"]
        if cache.extents is not None:
            self.moves += ["compact"] * 3

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.decode()
            name = self.random.choice(self.moves)
            if name != "none":
                getattr(self, name)()
                self.transitions += ROWS
            self.cache = self.operations["advance"](self.cache)
            assert self.cache.transitions.check_invariants(self.cache.ownership) == []
            assert np.asarray(self.cache.table.length).tolist() == [len(tokens) for tokens in self.tokens]
            self.compare_slots()

    def compare_slots(self) -> None:
        """Every tensor of every committed position, in all layers, is what was written for its token."""
        (group,), (layout,), (pools,) = self.cache.table.groups, self.cache.layouts, self.cache.pools
        table = np.asarray(group.pages)
        arrays = {pool.name: np.asarray(pools[pool.name]) for pool in layout.pools}
        for row, tokens in enumerate(self.tokens):
            position = np.arange(len(tokens))
            page, offset = table[row, position // group.page_size], position % group.page_size
            for layer in range(LAYERS):
                for pool in layout.pools:
                    slots = arrays[pool.name][layer * group.num_pages + page, :, offset]
                    for name, start, end in pool.slices:
                        np.testing.assert_array_equal(slots[..., start:end], TENSORS[name][layer, tokens], err_msg=name)

    def decode(self) -> None:
        wanted = self.random.integers(0, 7, ROWS) if self.random.random() < 0.5 else np.ones(ROWS, int)
        bound = TOKENS if wanted.max() > 1 else ROWS
        self.cache, grant = self.operations["reserve"](
            poison(self.cache), jnp.asarray(wanted, jnp.int32), max_tokens=bound
        )
        grant = jax.tree.map(np.asarray, grant)
        self.copies += int(grant.copies)
        self.transitions += 2 * int((wanted > 0).sum())  # reserve and commit
        packed = np.zeros(bound, int)
        drafts = [tokens.copy() for tokens in self.tokens]
        for index, row in enumerate(grant.row):
            if row < ROWS:
                assert grant.position[index] == len(drafts[row])
                packed[index] = self.next = (self.next + 1) % 4096
                drafts[row].append(packed[index])
        for layer in range(LAYERS):
            written = {name: values[layer, packed] for name, values in TENSORS.items()}
            self.cache = self.operations["write"](self.cache, jnp.int32(layer), grant, **written)
            out = np.asarray(self.operations["attend"](self.cache, jnp.int32(layer), grant, Q[layer, packed]))
            for index, row in enumerate(grant.row):
                if row == ROWS:
                    assert (out[index] == 0).all()
                    continue
                seen = drafts[row][: grant.position[index] + 1]
                np.testing.assert_allclose(out[index], expected_attention(layer, seen, packed[index]), atol=2e-5)
                self.checked += 1
        accepted = np.array([self.random.integers(0, n + 1) if self.random.random() < 0.2 else n for n in grant.tokens])
        self.cache = self.operations["commit"](self.cache, jnp.asarray(accepted, jnp.int32))
        self.tokens = [draft[: len(old) + n] for draft, old, n in zip(drafts, self.tokens, accepted, strict=True)]

    def fork(self) -> None:
        parent = self.random.integers(0, ROWS + 1, ROWS)
        self.cache, status = self.operations["fork"](self.cache, jnp.asarray(parent, jnp.int32), max_pages=64)
        before = list(self.tokens)
        for row, code in enumerate(np.asarray(status)):
            if code == Status.OK and parent[row] < ROWS:
                self.tokens[row] = before[parent[row]].copy()

    def reorder(self) -> None:
        parent = self.random.integers(0, ROWS, ROWS)
        self.cache, status = self.operations["reorder"](self.cache, jnp.asarray(parent, jnp.int32), max_pages=64)
        before = list(self.tokens)
        for row, code in enumerate(np.asarray(status)):
            if code == Status.OK and parent[row] != row:
                self.tokens[row] = before[parent[row]].copy()

    def truncate(self) -> None:
        length = np.array([self.random.integers(len(tokens) // 2, len(tokens) + 1) for tokens in self.tokens])
        self.cache, status = self.operations["truncate"](self.cache, jnp.asarray(length, jnp.int32), max_pages=64)
        assert (np.asarray(status) == Status.OK).all()
        self.tokens = [tokens[:n] for tokens, n in zip(self.tokens, length, strict=True)]

    def release(self) -> None:
        rows = self.random.random(ROWS) < 0.4
        self.cache, _ = self.operations["release"](self.cache, jnp.asarray(rows), max_pages=64)
        self.tokens = [[] if gone else tokens for tokens, gone in zip(self.tokens, rows, strict=True)]

    def adopt(self) -> None:
        donor, (group,) = int(self.random.integers(ROWS)), self.cache.table.groups
        taken = np.zeros(ROWS, int)
        if self.tokens[donor]:
            taken[self.random.integers(ROWS)] = self.random.integers(1, len(self.tokens[donor]) + 1)
        ids = jnp.broadcast_to(group.pages[donor], group.pages.shape)
        self.cache, status = self.operations["adopt"](self.cache, (ids,), jnp.asarray(taken, jnp.int32), max_pages=64)
        for row, code in enumerate(np.asarray(status)):
            if code == Status.OK and taken[row]:
                self.tokens[row] = self.tokens[donor][: taken[row]]

    def compact(self) -> None:
        moves = plan_compaction(self.cache.ownership, LIMITS, most_runs=1)
        if moves is not None:
            self.cache, status = self.operations["compact"](self.cache, moves, max_pages=LIMITS.pages)
            assert status == Status.OK
            self.compactions += 1


def make_cache(
    page_size: int,
    num_pages: int,
    rows: int = ROWS,
    *,
    side_tensor: bool = True,
    extents: kvjax.extents.ExtentOptions | None = None,
) -> kvjax.KVCache:
    tensors = [TensorSpec("k", KV_HEADS, DIM, "float32"), TensorSpec("v", KV_HEADS, DIM, "float32")]
    if side_tensor:
        tensors.append(TensorSpec("scale", KV_HEADS, 1, "float32"))
    spec = CacheSpec((GroupSpec("attention", tuple(range(LAYERS)), tuple(tensors)),))
    return kvjax.init(spec, rows=rows, num_pages=num_pages, page_size=page_size, max_context=64, extents=extents)
