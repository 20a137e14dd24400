"""The page table's part of a saved cache: its arrays by path, and a table from them again."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from kvjax.descriptor import Descriptor
from kvjax.pages import GroupShape, PageTable, check_invariants, make_page_table
from kvjax.saving.container import CacheFileError, Container

Path = str | os.PathLike[str]


def table_leaves(table: PageTable) -> dict[str, np.ndarray]:
    """The table's arrays on the host, by path."""
    leaves, _ = jax.tree.flatten_with_path(table)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def table_arrays(path: Path, container: Container, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The saved arrays, by path; CacheFileError if one is missing or of another length."""
    arrays = {}
    for name, shape in shapes.items():
        section = container.sections.get(f"table{name}")
        if section is None or section.size != 4 * math.prod(shape):
            raise CacheFileError(path, f"table{name}", f"does not hold int32{list(shape)}")
        arrays[name] = section.view(np.int32).reshape(shape)
    return arrays


def table_sizes(path: Path, tables: Mapping[str, np.ndarray], descriptor: Descriptor) -> dict[str, Any]:
    """The arguments of `init` that give a table of the saved sizes.

    A table of these sizes takes no more than the saved arrays, so that a wrong shape never becomes a huge allocation;
    CacheFileError if the arrays do not belong to one table.
    """
    page_size = [pages.page_size for pages in descriptor.pages]
    try:
        groups = range(len(descriptor.spec.groups))
        widths = [tables[f".groups[{index}].pages"].shape[1] for index in groups]
        num_pages = [tables[f".groups[{index}].refcount"].shape[0] for index in groups]
        rows, max_epochs = tables[".length"].shape[0], tables[".groups[0].fences"].shape[0]
    except (KeyError, IndexError) as error:
        raise CacheFileError(path, "table", f"lacks an array ({error})") from error
    try:
        shapes = tuple(map(GroupShape, num_pages, page_size, widths))
        empty = jax.eval_shape(partial(make_page_table, shapes, rows=rows, max_epochs=max_epochs))
    except ValueError as error:
        raise CacheFileError(path, "table", f"has sizes that no table has ({error})") from error
    _check_shapes(path, tables, empty)
    return {
        "rows": rows,
        "num_pages": num_pages,
        "page_size": page_size,
        "max_context": min(width * size for width, size in zip(widths, page_size, strict=True)),
        "max_epochs": max_epochs,
    }


def with_leaves(path: Path, empty: PageTable, arrays: Mapping[str, np.ndarray]) -> PageTable:
    """The saved table, on the devices of an empty one of its sizes; CacheFileError if it is not sound."""
    _check_shapes(path, arrays, empty)
    leaves, structure = jax.tree.flatten_with_path(empty)
    placed = [jax.device_put(np.array(arrays[jax.tree_util.keystr(place)]), leaf.sharding) for place, leaf in leaves]
    table = jax.tree.unflatten(structure, placed)
    broken = check_invariants(table)
    if broken:
        raise CacheFileError(path, "table", f"is not sound: {'; '.join(broken[:8])}")
    return table


def _check_shapes(path: Path, arrays: Mapping[str, np.ndarray], table: PageTable) -> None:
    """CacheFileError unless the arrays are those of this table, which may be abstract."""
    leaves, _ = jax.tree.flatten_with_path(table)
    wanted = {jax.tree_util.keystr(place): leaf.shape for place, leaf in leaves}
    saved = {name: array.shape for name, array in arrays.items()}
    if saved != wanted:
        raise CacheFileError(path, "table", f"has arrays {saved}; a cache of these sizes has {wanted}")
