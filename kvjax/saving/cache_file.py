"""Saving a cache to a file and reading it back: the table, and the bytes of the pages somebody holds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from kvjax.allocation import init
from kvjax.attention.paged import Backend
from kvjax.cache import KVCache
from kvjax.descriptor import Descriptor, DescriptorError, DescriptorMismatch, explain
from kvjax.extents import ExtentOptions, find_extents
from kvjax.pages import PageTable
from kvjax.saving.container import CacheFileError, Container, read_container, write_container
from kvjax.saving.description import own_fields
from kvjax.saving.table_file import table_arrays, table_leaves, table_sizes, with_leaves
from kvjax.storage import Pool, read_pages, write_pages

RUN_PAGES = 256
"""Pages of a pool, in all layers, that are moved at a time.  A section holds its pages in runs of so many."""


def save(cache: KVCache, path: str | os.PathLike[str], descriptor: Descriptor) -> None:
    """Writes a cache to a file, at once or not at all.

    The file holds the descriptor, the table and the pages that a row or a pin holds, and a checksum over all of it.
    Waits for the device; costs one pass over the held pages, and host memory for a run of them.

    Args:
      cache: the cache; it stays as it is.
      path: where to; a file that is there is replaced.  Only its owner can read it.
      descriptor: what a reader must match (`kvjax.describe` makes it).

    Raises:
      ValueError: a table that breaks an invariant; nothing is written.
      DescriptorMismatch: a descriptor of another cache; nothing is written.
      OSError: the file cannot be written; what was there before is untouched.
    """
    broken = cache.transitions.check_invariants(cache.ownership)
    if broken:
        raise ValueError(f"the cache is not sound and was not saved: {'; '.join(broken[:8])}")
    _check_describes(cache, descriptor)
    leaves = table_leaves(cache.table)
    live = [np.flatnonzero(np.asarray(group.refcount)).astype(np.int32) for group in cache.table.groups]
    sections = {f"table{name}": leaf.nbytes for name, leaf in leaves.items()}
    for index, pools in enumerate(cache.pools):
        for name, pool in pools.items():
            sections[_pool_section(index, name)] = pool.nbytes // cache.table.groups[index].num_pages * len(live[index])
    shapes = tuple((name, leaf.shape) for name, leaf in leaves.items())
    write_container(path, (descriptor.to_bytes(), shapes), sections, _blocks(cache, leaves, live))


def load(
    path: str | os.PathLike[str],
    descriptor: Descriptor,
    *,
    backend: Backend | None = None,
    mesh: Mesh | None = None,
    shardings: PartitionSpec | None = None,
    extents: ExtentOptions | None = None,
) -> KVCache:
    """A cache from a file: the same rows, pages and pins as when it was saved, and as many pages.

    Length and checksum of the whole file are checked before the first array is made.

    Args:
      path: a file that `save` wrote.
      descriptor: what the reader needs; every field must be equal.
      backend, mesh, shardings, extents: as for `kvjax.init`.  A file holds who owns which page; which pages are
        adjacent follows from it, so a cache may be loaded with extents or without, however it was saved.

    Raises:
      CacheFileError: a file that is cut short, changed or no saved cache; says which part.
      DescriptorMismatch: the cache of another model, weight version, tenant …; names each field.
      ValueError, NotImplementedError: what `kvjax.init` refuses, or rows in more runs than `extents` allow.
    """
    container = read_container(path)
    found, shapes = _header(path, container)
    differences = explain(found, descriptor)
    if differences:
        raise DescriptorMismatch(f"the cache in {os.fspath(path)}", differences)
    tables = table_arrays(path, container, shapes)
    sizes = table_sizes(path, tables, descriptor)
    cache = init(descriptor.spec, **sizes, backend=backend, mesh=mesh, shardings=shardings, extents=extents)
    own = replace(descriptor, **own_fields(cache))
    differences = explain(found, own)
    if differences:
        raise DescriptorMismatch(f"the cache in {os.fspath(path)}, for this backend and mesh,", differences)
    table = with_leaves(path, cache.table, tables)
    if [tokens.computed for tokens in descriptor.tokens] != _row_lengths(table):
        raise CacheFileError(path, "table.length", f"is {_row_lengths(table)}; the descriptor has {descriptor.tokens}")
    live = [np.flatnonzero(np.asarray(group.refcount)).astype(np.int32) for group in table.groups]
    _check_lengths(path, cache, container, live)
    adjacent = None if cache.extents is None else find_extents(table, cache.extents)
    return replace(cache, table=table, extents=adjacent, pools=_filled(cache, container, live))


def _check_describes(cache: KVCache, descriptor: Descriptor) -> None:
    """DescriptorMismatch unless the descriptor is that of this cache, as far as a cache knows."""
    own = replace(descriptor, **own_fields(cache))
    lengths = _row_lengths(cache.table)
    if [tokens.computed for tokens in descriptor.tokens] != lengths:
        raise ValueError(f"descriptor.tokens={descriptor.tokens} must describe rows of {lengths} tokens, one each")
    differences = explain(own, descriptor)
    if differences:
        repair = "Nothing was written; make the descriptor with kvjax.describe"
        raise DescriptorMismatch("the cache to be saved", differences, repair)


def _row_lengths(table: PageTable) -> list[int]:
    """Tokens of each row that is not empty."""
    return [length for length in np.asarray(table.length).tolist() if length]


def _blocks(cache: KVCache, leaves: Mapping[str, np.ndarray], live: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The bytes of all sections, in order."""
    yield from leaves.values()
    for pools, group, ids in zip(cache.pools, cache.table.groups, live, strict=True):
        for pool in pools.values():
            for run in _runs(ids):
                yield np.asarray(_read(pool, group.num_pages, jnp.asarray(run)))


def _filled(cache: KVCache, container: Container, live: list[np.ndarray]) -> tuple[dict[str, Pool], ...]:
    """The pools with the saved pages where they were."""
    filled = []
    for index, (pools, group, ids) in enumerate(zip(cache.pools, cache.table.groups, live, strict=True)):
        done = {}
        for name, pool in pools.items():
            layers, start = pool.shape[0] // group.num_pages, 0
            section = container.sections[_pool_section(index, name)].view(pool.dtype)
            for run in _runs(ids):
                shape = (layers, len(run), *pool.shape[1:])
                images = section[start : start + math.prod(shape)].reshape(shape)
                pool = _write(pool, group.num_pages, jnp.asarray(run), np.ascontiguousarray(images))
                start += images.size
            done[name] = pool
        filled.append(done)
    return tuple(filled)


def _runs(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[first : first + RUN_PAGES] for first in range(0, len(ids), RUN_PAGES)]


_read = jax.jit(read_pages, static_argnames="num_pages")
_write = jax.jit(write_pages, static_argnames="num_pages", donate_argnames="pool")


def _pool_section(group: int, name: str) -> str:
    return f"pools[{group}].{name}"


def _header(path: Any, container: Container) -> tuple[Descriptor, dict[str, tuple[int, ...]]]:
    try:
        data, shapes = container.header
        for name, shape in shapes:
            if type(name) is not str or type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(f"array {name!r} has shape {shape!r}, which must be integers of at least 0")
        return Descriptor.from_bytes(data), dict(shapes)
    except DescriptorError as error:
        raise CacheFileError(path, "descriptor", str(error)) from error
    except (TypeError, ValueError) as error:
        raise CacheFileError(path, "header", f"is not that of a saved cache ({error})") from error


def _check_lengths(path: Any, cache: KVCache, container: Container, live: list[np.ndarray]) -> None:
    for index, pools in enumerate(cache.pools):
        for name, pool in pools.items():
            section = container.sections.get(_pool_section(index, name))
            expected = pool.nbytes // cache.table.groups[index].num_pages * len(live[index])
            if section is None or section.size != expected:
                raise CacheFileError(
                    path, _pool_section(index, name), f"does not hold the {expected} bytes of its pages"
                )
