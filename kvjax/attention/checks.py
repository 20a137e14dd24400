"""The debug mode of attention: page ids are looked at before they are followed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
from jaxtyping import Array, Int32

from pallas_kernels.arguments import Attention, Tiles
from pallas_kernels.page_ids import check_page_ids

_checking: ContextVar[bool] = ContextVar("kvjax_page_checks", default=False)


@contextmanager
def page_checks() -> Iterator[None]:
    """Programs traced inside check, on the host, every page id that attention is about to follow.

    For debugging: each call of attention brings its page table to the host. What is compiled already stays as it is.
    An id outside the pool raises, where the program is waited for, a `jax.errors.JaxRuntimeError` that names row and
    page. Without this an id is trusted; it is never clipped into the pool on purpose.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def check_if_asked(
    pages: Int32[Array, "rows width"],
    tiles: Tiles,
    page_offset: Int32[Array, ""],
    *,
    total_pages: int,
    page_size: int,
    attention: Attention,
) -> None:
    """Adds the check to the program that is being traced, inside `page_checks`."""
    if _checking.get():
        check = partial(check_page_ids, total_pages=total_pages, page_size=page_size, attention=attention)
        jax.debug.callback(check, pages, tiles, page_offset)
