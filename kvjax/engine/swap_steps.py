"""What swapping runs on the device: pinning and reading rows' pages, unpinning them, and writing them back.

The host says which pages it means by (row, logical page); their ids stay on the device.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Int32

import kvjax
from kvjax.engine.backing import Backing
from kvjax.pages import PageTable
from kvjax.pages.mapping import read_entries
from kvjax.storage import Images, read_pages, write_pages

PageIds = tuple[Int32[Array, " pages"], ...]
"""Page ids of each group."""

CacheImages = tuple[dict[str, Images], ...]
"""Images of the same pages in every pool of every group."""


def save_pages(
    cache: kvjax.KVCache, row: Int32[Array, " pages"], logical: Int32[Array, " pages"]
) -> tuple[kvjax.KVCache, PageIds, CacheImages]:
    """Pins pages and reads them, every tensor and layer; `row` is out of range in padding.

    Returns the cache, what `unpin_pages` takes, and the bytes.  A pin cannot be refused, because the rows hold their
    pages; were one missing, `unpin_pages` would say so.
    """
    ids = _page_ids(cache.table, row, logical)
    cache, _ = kvjax.pin(cache, ids)
    images = tuple(
        {name: read_pages(pool, group.num_pages, page) for name, pool in pools.items()}
        for pools, group, page in zip(cache.pools, cache.table.groups, ids, strict=True)
    )
    cache, images = kvjax.after(cache, images)
    return cache, ids, images


def unpin_pages(
    backing: Backing, cache: kvjax.KVCache, ids: PageIds
) -> tuple[kvjax.KVCache, PageIds, Int32[Array, ""]]:
    """Lets go of saved pages: those nobody else holds are free.  Returns the cache, a `Status` each, and free pages."""
    cache, status = kvjax.unpin(cache, ids)
    cache = backing.advance(cache)
    return cache, status, backing.free(cache)


def restore_pages(
    backing: Backing,
    cache: kvjax.KVCache,
    tokens: Int32[Array, " rows"],
    row: Int32[Array, " pages"],
    logical: Int32[Array, " pages"],
    images: CacheImages,
) -> tuple[kvjax.KVCache, Int32[Array, " rows"], Int32[Array, ""]]:
    """Lengthens rows by `tokens` whose bytes stand in saved pages, which fill the rows' (row, logical) pages.

    Rows must end with a whole page; `row` is out of range where an image is not wanted.  Returns the cache, the
    `Status` of each row, and the number of free pages.
    """
    cache, grant = kvjax.reserve(cache, tokens, max_tokens=row.shape[0] * backing.page_size)
    ids = _page_ids(cache.table, row, logical)
    pools = tuple(
        {name: write_pages(pool, group.num_pages, page, image[name]) for name, pool in pools.items()}
        for pools, group, page, image in zip(cache.pools, cache.table.groups, ids, images, strict=True)
    )
    cache = kvjax.commit(replace(cache, pools=pools), grant.tokens)
    return cache, grant.status, backing.free(cache)


def _page_ids(table: PageTable, row: Int32[Array, " pages"], logical: Int32[Array, " pages"]) -> PageIds:
    return tuple(read_entries(group, row, logical) for group in table.groups)
