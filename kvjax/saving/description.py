"""The part of a descriptor that a cache knows of itself."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from kvjax.cache import KVCache
from kvjax.descriptor import Descriptor, tokens_of
from kvjax.layout import CANONICAL_ORDER, Shard


def describe(cache: KVCache, tokens: Sequence[Sequence[int]], **contract: Any) -> Descriptor:
    """The descriptor of a cache: spec, pages and shards from it, the rest from the caller.

    Args:
      cache: the cache.
      tokens: the token ids of each row, committed ones only; empty for empty rows.
      contract: the other fields of `kvjax.descriptor.Descriptor`: model, text, adapter, media, rope, positions,
        quantisation, tenant.  What a model does not have is None or (); nothing is left out.

    Raises:
      ValueError: tokens that do not fit the rows' lengths, or a field of another type.
      TypeError: a field that is missing or unknown.
    """
    descriptor = Descriptor(
        tokens=tuple(tokens_of(ids) for ids in tokens if len(ids)),
        **own_fields(cache),
        **contract,
    )
    lengths = np.asarray(cache.table.length).tolist()
    if [len(ids) for ids in tokens] != lengths:
        raise ValueError(f"rows hold {lengths} tokens, and ids are given for {[len(ids) for ids in tokens]}")
    return descriptor


def own_fields(cache: KVCache) -> dict[str, Any]:
    """The fields of a descriptor that follow from the cache and this machine."""
    return {
        "spec": cache.spec,
        "pages": cache.layouts,
        "order": CANONICAL_ORDER,
        "shards": shards_of(cache),
        "byte_order": sys.byteorder,
    }


def shards_of(cache: KVCache) -> tuple[Shard, ...]:
    """How the pools' heads are split over a mesh; empty where they are not."""
    sharding = next(iter(cache.pools[0].values())).sharding
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < 2 or sharding.spec[1] is None:
        return ()
    axis = sharding.spec[1]
    names = axis if isinstance(axis, tuple) else (axis,)
    count = math.prod(sharding.mesh.shape[name] for name in names)
    return (Shard("head", ",".join(names), count),) if count > 1 else ()
