"""What the kernels that move cached bytes ask of their arguments."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import PAGE_SIZES, QUANTISED_DTYPES, QUERY_DTYPES


def check_append_arguments(
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    tensors: tuple[Float[Array, "packed kv_heads _"], ...],
    *,
    scales: tuple[Float32[Array, "*_"], ...] | None,
    lane_multiple: int,
) -> None:
    """Raises ValueError, saying what to change, unless shapes, dtypes and sizes are what the kernels take.

    `lane_multiple` is what the last axis of the pool and of the scales is rounded up to on this backend.
    """
    if pool.ndim != 4 or page.ndim != 1 or not tensors or any(tensor.ndim != 3 for tensor in tensors):
        raise ValueError(
            f"{pool.shape=}, {page.shape=}, tensors of shapes {[tensor.shape for tensor in tensors]}; pass pool "
            "[total_pages, kv_heads, page_size, lanes], page [packed] and tensors [packed, kv_heads, dim]"
        )
    _, kv_heads, page_size, lanes = pool.shape
    if 0 in (*pool.shape, *page.shape):
        raise ValueError(f"{pool.shape=}, {page.shape=}; no dimension may be 0: do not call the kernel")
    if pool.dtype not in (*QUERY_DTYPES, *QUANTISED_DTYPES):
        raise ValueError(f"{pool.dtype=}; use one of {', '.join((*QUERY_DTYPES, *QUANTISED_DTYPES))}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=}; make pages of 16, 32, 64 or 128 tokens")
    for name, array in (("page", page), ("offset", offset)):
        if array.dtype != jnp.int32 or array.shape != page.shape:
            raise ValueError(f"{name}: {array.shape=}, {array.dtype=}; pass int32, one a packed token {page.shape}")
    for tensor in tensors:
        stored = scales is None and tensor.dtype == pool.dtype
        if tensor.shape[:2] != (*page.shape, kv_heads) or not (stored or tensor.dtype in QUERY_DTYPES):
            raise ValueError(
                f"a tensor has {tensor.shape=}, {tensor.dtype=}; pass [packed={page.shape[0]}, {kv_heads=}, dim] of "
                f"{', '.join(QUERY_DTYPES)}"
            )
    used = sum(tensor.shape[2] for tensor in tensors)
    if lanes != -(-used // lane_multiple) * lane_multiple:
        raise ValueError(
            f"{lanes=} of the pool; tensors of {used} lanes side by side need "
            f"{-(-used // lane_multiple) * lane_multiple}: lay the pool out so"
        )
    _check_scales(pool, tensors, scales, lane_multiple)


def _check_scales(
    pool: Array, tensors: tuple[Array, ...], scales: tuple[Float32[Array, "*_"], ...] | None, lane_multiple: int
) -> None:
    if pool.dtype not in QUANTISED_DTYPES:
        if scales is not None:
            raise ValueError(f"scales for {pool.dtype=}; only {', '.join(QUANTISED_DTYPES)} are scaled: pass None")
        return
    if scales is None and all(tensor.dtype == pool.dtype for tensor in tensors):
        return  # quantised before
    if scales is None or len(scales) != len(tensors):
        raise ValueError(
            f"{pool.dtype=} needs scales for each of {len(tensors)} tensors; pass ones if need be, or tensors "
            "quantised to its dtype before"
        )
    total_pages, kv_heads, page_size, _ = pool.shape
    least = kv_heads * page_size
    for scale in scales:
        per_token = scale.ndim == 2 and scale.shape[0] == total_pages
        if scale.dtype != jnp.float32 or not (scale.shape in ((), (kv_heads,)) or per_token):
            raise ValueError(
                f"scales have {scale.shape=}, {scale.dtype=}; pass float32 of shape (), ({kv_heads},) or "
                f"({total_pages}, scale_lanes)"
            )
        if (scale.ndim == 2) != (scales[0].ndim == 2):
            raise ValueError("one tensor has scales a token and another has not; give both the same kind")
        if per_token and (scale.shape[1] < least or scale.shape[1] % lane_multiple):
            raise ValueError(
                f"scales have {scale.shape=}; a page has {least}: make the last axis at least that, and a multiple of "
                f"{lane_multiple}"
            )


def check_page_list(pool: Shaped[Array, "total_pages *page"], pages: Int32[Array, " pages"], num_pages: int) -> None:
    """Raises ValueError unless the pool holds whole layers of `num_pages` and the page numbers are a list of int32."""
    if pool.ndim < 2 or 0 in pool.shape or num_pages < 1 or pool.shape[0] % num_pages:
        raise ValueError(f"{pool.shape=}, {num_pages=}; pass [layers · num_pages, …], no dimension of it 0")
    if pages.ndim != 1 or pages.dtype != jnp.int32 or not pages.shape[0]:
        raise ValueError(f"{pages.shape=}, {pages.dtype=}; pass page numbers as a list of int32, at least one")


def check_images(
    pool: Shaped[Array, "total_pages *page"],
    pages: Int32[Array, " pages"],
    images: Shaped[Array, "layers pages *page"],
    num_pages: int,
) -> None:
    """Raises ValueError unless the images are what `gather_pages` gives of these pages."""
    expected = (pool.shape[0] // num_pages, *pages.shape, *pool.shape[1:])
    if images.shape != expected or images.dtype != pool.dtype:
        raise ValueError(f"{images.shape=}, {images.dtype=}; images of these pages are {expected}, {pool.dtype}")
