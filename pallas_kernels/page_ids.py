"""The check that kernels leave out: whether every page id they will follow is one of the pool's."""

import numpy as np
from jaxtyping import Bool, Int32

from pallas_kernels.arguments import Attention, Tiles


def check_page_ids(
    pages: Int32[np.ndarray, "rows width"],
    tiles: Tiles,
    page_offset: Int32[np.ndarray, ""],
    *,
    total_pages: int,
    page_size: int,
    attention: Attention,
) -> None:
    """Raises ValueError, naming the tile, its row and the page, unless all ids that the tiles read are in the pool.

    On the host, with the values of a kernel's arguments. Kernels trust them: a check costs most of what it takes to
    start a copy, and clipping an id would only hide the fault. Cost: O(tiles · width).
    """
    pages = np.asarray(pages)
    row, context = np.asarray(tiles.row), np.asarray(tiles.context)
    read = pages_read(tiles, pages.shape[1], page_size, attention)
    reading = read.any(axis=1)
    _refuse(reading & ~((row >= 0) & (row < len(pages))), tiles, f"its row is not one of the {len(pages)} of the table")
    _refuse(
        reading & (context > pages.shape[1] * page_size),
        tiles,
        f"the table has {pages.shape[1]} pages of {page_size} tokens a row",
    )
    ids = pages[np.clip(row, 0, len(pages) - 1)].astype(np.int64) + int(page_offset)
    wrong = read & ((ids < 0) | (ids >= total_pages))
    if wrong.any():
        tile, column = np.argwhere(wrong)[0]
        _refuse(
            np.arange(len(row)) == tile,
            tiles,
            f"logical page {column} is page {ids[tile, column]} (page_offset={int(page_offset)} included) of a pool of "
            f"{total_pages}",
        )


def pages_read(tiles: Tiles, width: int, page_size: int, attention: Attention) -> Bool[np.ndarray, "tiles width"]:
    """Which of the logical pages [0, width) the queries of each tile see."""
    queries, context = (np.asarray(part).astype(np.int64) for part in (tiles.queries, tiles.context))
    end = np.where(queries > 0, context, 0)[:, None]
    start = 0 if attention.window is None else np.maximum(context - queries + 1 - attention.window, 0)[:, None]
    first = np.arange(width, dtype=np.int64) * page_size
    return (first < end) & ((first + page_size > start) | (first < attention.kept))


def _refuse(wrong: Bool[np.ndarray, " tiles"], tiles: Tiles, why: str) -> None:
    if wrong.any():
        tile = int(np.flatnonzero(wrong)[0])
        row, queries, context = (int(part[tile]) for part in (tiles.row, tiles.queries, tiles.context))
        raise ValueError(
            f"tile {tile} ({row=}, {queries=}, {context=}) cannot be read: {why}. Reserve its pages before attending"
        )
