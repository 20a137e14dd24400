"""Digests of what a descriptor names but does not hold: token ids, weights, text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from kvjax.descriptor.encoding import encode
from kvjax.descriptor.schema import Tokens


def token_digest(ids: Iterable[int]) -> str:
    """SHA-256 of token ids, each as 8 bytes: ids of any integer type that are equal digest alike.

    Raises:
      ValueError: something that is no sequence of integers of up to 64 bits.
    """
    ids = np.asarray(list(ids) if not isinstance(ids, np.ndarray) else ids)
    if ids.size == 0:
        ids = ids.astype(np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids have shape {ids.shape} and dtype {ids.dtype}; pass one row of integers")
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def tokens_of(ids: Iterable[int]) -> Tokens:
    """The `Tokens` of one sequence, all of whose ids are computed."""
    ids = list(ids)
    return Tokens(token_digest(ids), len(ids))


def text_digest(text: str) -> str:
    """SHA-256 of a text (a tokenizer's file, a chat template), as UTF-8."""
    return hashlib.sha256(encode(text)).hexdigest()


def weights_digest(weights: Any) -> str:
    """SHA-256 over a pytree of arrays: every leaf's path, dtype, shape and bytes.

    Cost: every byte is brought to the host and hashed once, one leaf at a time, so the temporary is one leaf.  SHA-256
    ran at 1.8 GB a second on one core of an AMD EPYC, which has instructions for it: digest weights once, when they
    are loaded, and keep the result.  Where a leaf lies (device, sharding) does not matter.
    """
    total = hashlib.sha256()
    leaves, _ = jax.tree.flatten_with_path(weights)
    for path, leaf in leaves:
        array = np.ascontiguousarray(jax.device_get(leaf))
        total.update(encode((jax.tree_util.keystr(path), array.dtype.name, tuple(map(int, np.shape(leaf))))))
        total.update(hashlib.sha256(array.view(np.uint8)).digest())
    return total.hexdigest()
