"""Virtual spaces for tests, and what they hold, read and written without attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.virtual import VirtualSpace

SPEC = kvjax.CacheSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32")
"""512 bytes a token, so that the smallest page-group, 4 KiB, is 8 tokens."""

PAGE = 8
ROWS = 4
CONTEXT = 64
PACKED = 128
"""Tokens of all rows that one step may write."""


def make_space(**options: Any) -> VirtualSpace:
    """A small space; one shape for most tests, so that the table's transitions are compiled once."""
    sizes: dict[str, Any] = {
        "rows": ROWS,
        "num_pages": 16,
        "max_context": CONTEXT,
        "page_group_bytes": 4096,
        "lookahead": 0,
    }
    return VirtualSpace(SPEC, **(sizes | options))


@jax.jit
def _write(cache: Any, tokens: Any, values: Any) -> tuple[Any, Any]:
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=PACKED)
    each = values.at[grant.row, grant.position].get(mode="fill", fill_value=-1)
    for layer in range(2):
        k = jnp.broadcast_to(each[:, None, None], (PACKED, 1, 32))
        cache = kvjax.write(cache, layer, grant, k=k, v=k + layer + 0.5)
    return cache.order, grant.status


def write(space: VirtualSpace, values: list[list[int]]) -> jax.Array:
    """Writes row r's values from its committed length on, as one step would; the step's end."""
    cache = space.cache()
    dense = np.zeros((ROWS, CONTEXT), np.float32)
    tokens = np.array([len(row) for row in values], np.int32)
    for row, (start, new) in enumerate(zip(np.asarray(cache.length), values, strict=True)):
        dense[row, start : start + len(new)] = new
    order, status = _write(cache, tokens, dense)
    assert not np.any(np.asarray(status)), status
    return order


def contents(space: VirtualSpace, row: int, length: int) -> list[int]:
    """The values a row's first `length` tokens hold, every lane of every layer checked against the first."""
    (memory,) = space.cache().memory.values()
    tokens = np.asarray(memory)[row, :length]
    expected = np.concatenate([tokens[:, :1].repeat(32, 1), tokens[:, :1].repeat(32, 1) + 0.5] * 2, axis=1)
    expected[:, 96:] += 1
    np.testing.assert_array_equal(tokens, expected)
    return tokens[:, 0].astype(int).tolist()


def fill(space: VirtualSpace, tokens: int, first: int = 1, row: int | None = None) -> int:
    """Admits a request and writes `tokens` values from `first` on; its row."""
    row = space.admit(tokens) if row is None else row
    assert row is not None
    extend(space, {row: [first + index for index in range(tokens)]})
    return row


def extend(space: VirtualSpace, values: dict[int, list[int]]) -> np.ndarray:
    """One step that appends values to rows; status codes.  Rows that are refused get nothing."""
    lengths = np.asarray(space.cache().length).astype(np.int64)
    asked = np.zeros(ROWS, np.int64)
    for row, new in values.items():
        asked[row] = lengths[row] + len(new)
    status = space.step(asked)
    new = [values.get(row, []) if status[row] == kvjax.Status.OK else [] for row in range(ROWS)]
    space.follow(write(space, new))
    space.commit()
    return status
