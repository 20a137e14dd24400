"""The contract of the kernels that move cached bytes: problems of random bits, and what numpy makes of them.

Every byte of a pool is random, NaNs of all kinds among them, and the whole pool is compared bit by bit: what a kernel
must not touch has to come back as it was. The answers come from loops over numpy arrays, none from kvjax or JAX.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

Arrays = Sequence[np.ndarray]
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
}
OUT_OF_RANGE = (2**30, -1, -(2**20))


@dataclass(frozen=True)
class Case:
    """An append. `rows` holds (first position, tokens) of each row; a page is mapped wherever there are tokens."""

    kv_heads: int
    widths: tuple[int, ...]
    page_size: int
    dtype: str
    scales: str = "none"  # or: tensor, head, token
    rows: tuple[tuple[int, int], ...] = ((0, 1), (15, 1), (6, 3), (3, 22), (0, 16), (30, 0))

    def __str__(self) -> str:
        return f"{self.kv_heads}x{'+'.join(map(str, self.widths))}-page{self.page_size}-{self.dtype}-{self.scales}"


PLAIN = Case(2, (64, 64), 16, "bfloat16")
CASES = (
    PLAIN,
    Case(3, (128, 128), 16, "float32"),
    Case(2, (64, 64), 16, "float16"),
    Case(2, (80, 80), 32, "bfloat16"),
    Case(1, (96, 64), 16, "bfloat16"),
    Case(2, (112, 112), 64, "bfloat16"),
    Case(2, (192, 128), 16, "bfloat16"),
    Case(1, (256, 256), 128, "bfloat16"),
    Case(2, (64, 64), 16, "float8_e4m3fn", "tensor"),
    Case(2, (128, 64), 32, "float8_e5m2", "head"),
    Case(3, (64, 64), 16, "int8", "head"),
    Case(2, (80, 80), 16, "float8_e4m3fn", "token"),
    Case(3, (64, 64), 64, "float8_e5m2", "token"),
    Case(9, (64, 64), 16, "int8", "token"),
    Case(2, (64,), 16, "int8", "tensor"),  # one tensor a pool
    Case(2, (64, 64), 16, "bfloat16", rows=((0, 0), (4, 0))),  # nothing but padding
)


@dataclass(frozen=True)
class Problem:
    """The arguments of an append, as numpy arrays, and what it must return."""

    pool: np.ndarray
    page: np.ndarray
    offset: np.ndarray
    tensors: Arrays
    scales: Arrays | None
    expected_pool: np.ndarray
    expected_scales: Arrays | None


def random_bits(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = DTYPES[dtype]
    return random.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=np.uint8).view(kind)


def make_append(case: Case, *, lane_multiple: int = 1, seed: int = 0) -> Problem:
    """The problem of a case, the same for the same seed. Lanes are rounded up to `lane_multiple`."""
    random = np.random.default_rng(seed)
    size = case.page_size
    lanes = -(-sum(case.widths) // lane_multiple) * lane_multiple
    mapped = sum(-(-(first + tokens) // size) for first, tokens in case.rows if tokens)
    total_pages = mapped + 3
    free = iter(random.permutation(total_pages))
    page, offset = [], []
    for row, (first, tokens) in enumerate(case.rows):
        pages = [next(free) for _ in range(-(-(first + tokens) // size))] if tokens else []
        page += [pages[position // size] for position in range(first, first + tokens)]
        offset += [position % size for position in range(first, first + tokens)]
        # Padding between the rows, which is dropped for its page, or for its slot.
        page += [(total_pages, *OUT_OF_RANGE)[row % 4], 1]
        offset += [row % size, (size, *OUT_OF_RANGE)[row % 4]]
    packed = len(page)

    pool = random_bits(random, (total_pages, case.kv_heads, size, lanes), case.dtype)
    spread = np.exp2(random.integers(-6, 4, (packed, case.kv_heads, 1)))
    tensors = [
        (random.standard_normal((packed, case.kv_heads, width)) * spread).astype(np.float32) for width in case.widths
    ]
    tensors[0][0] = 0  # a token without a largest magnitude
    if case.dtype == "bfloat16":
        tensors = [tensor.astype(DTYPES["bfloat16"]) for tensor in tensors]
    scales = _make_scales(case, total_pages, lane_multiple, random)
    problem = Problem(
        pool, np.array(page, np.int32), np.array(offset, np.int32), tensors, scales, pool.copy(), _copies(scales)
    )
    _append(case, problem)
    return problem


def _make_scales(case: Case, total_pages: int, lane_multiple: int, random: np.random.Generator) -> Arrays | None:
    if case.scales == "none":
        return None
    if case.scales == "token":
        lanes = -(-case.kv_heads * case.page_size // lane_multiple) * lane_multiple
        return [random_bits(random, (total_pages, lanes), "float32") for _ in case.widths]
    shape = () if case.scales == "tensor" else (case.kv_heads,)
    # Small enough that some values are beyond the range and have to saturate.
    return [np.asarray(random.uniform(0.5e-2, 2e-2, shape), np.float32) for _ in case.widths]


def _copies(arrays: Arrays | None) -> Arrays | None:
    return None if arrays is None else [array.copy() for array in arrays]


def _append(case: Case, problem: Problem) -> None:
    """Writes into the expected arrays, token by token."""
    pool, scales = problem.expected_pool, problem.expected_scales
    for token, (page, slot) in enumerate(zip(problem.page, problem.offset, strict=True)):
        if not (0 <= page < len(pool) and 0 <= slot < case.page_size):
            continue
        for head in range(case.kv_heads):
            start = 0
            for index, (tensor, width) in enumerate(zip(problem.tensors, case.widths, strict=True)):
                values = tensor[token, head].astype(np.float32)
                if scales is None:
                    stored = values.astype(pool.dtype)
                else:
                    if case.scales == "token":
                        scale = np.abs(values).max() * np.float32(1 / _limits(pool.dtype)[1])
                        scales[index][page, head * case.page_size + slot] = scale
                    else:
                        scale = np.broadcast_to(scales[index], case.kv_heads)[head]
                    stored = _quantise(values, scale, pool.dtype)
                pool[page, head, slot, start : start + width] = stored
                start += width
            pool[page, head, slot, start:] = 0


def _limits(dtype: np.dtype) -> tuple[float, float]:
    info = np.iinfo(dtype) if dtype == np.int8 else ml_dtypes.finfo(dtype)
    return float(info.min), float(info.max)


def _quantise(values: np.ndarray, scale: np.float32, dtype: np.dtype) -> np.ndarray:
    if scale == 0:
        return np.zeros(values.shape, dtype)
    values = np.clip(values / scale, *_limits(dtype))
    return (np.rint(values) if dtype == np.int8 else values).astype(dtype)


def check_append(append: Callable, case: Case, *, lane_multiple: int = 1, **options: object) -> None:
    """Runs `append(pool, page, offset, tensors, scales=…, **options)` on a case and compares every bit."""
    problem = make_append(case, lane_multiple=lane_multiple)
    arrays = (problem.pool, problem.page, problem.offset, tuple(problem.tensors))
    scales = None if problem.scales is None else tuple(problem.scales)
    call = jax.jit(lambda arrays, scales: append(*arrays, scales=scales, **options))
    pool, scales = call(arrays, scales)
    same_bits(pool, problem.expected_pool, "pool")
    for index, expected in enumerate(problem.expected_scales or ()):
        same_bits(scales[index], expected, f"scales {index}")


LAYERS, PAGES = 3, 7
PAGE_SHAPES = (((2, 16, 128), "bfloat16"), ((1, 16, 128), "int8"), ((128,), "float32"))
SOURCE = np.array([1, PAGES, 3, 5, 2, -1, 2**30], np.int32)
TARGET = np.array([4, 6, PAGES, 0, -1, 6, 6], np.int32)


def check_copy(copy: Callable, shape: tuple[int, ...], dtype: str, **options: object) -> None:
    """Two pages are copied in all layers; every other pair has a number out of range."""
    pool = random_bits(np.random.default_rng(0), (LAYERS * PAGES, *shape), dtype)
    expected = pool.copy()
    for layer in range(0, LAYERS * PAGES, PAGES):
        expected[layer + 4], expected[layer] = pool[layer + 1], pool[layer + 5]
    same_bits(copy(*_on_device(pool, SOURCE, TARGET), num_pages=PAGES, **options), expected, "pool")


def check_gather(gather: Callable, shape: tuple[int, ...], dtype: str, **options: object) -> None:
    """Pages are read, one of them twice; those out of range are zeros."""
    pool = random_bits(np.random.default_rng(0), (LAYERS * PAGES, *shape), dtype)
    pages = np.array([6, PAGES, 1, 6, -1, 0], np.int32)
    layers = pool.reshape(LAYERS, PAGES, *shape)
    none = np.zeros_like(layers[:, 0])
    expected = np.stack([layers[:, page] if 0 <= page < PAGES else none for page in pages], axis=1)
    same_bits(gather(*_on_device(pool, pages), num_pages=PAGES, **options), expected, "images")


def check_write(write: Callable, shape: tuple[int, ...], dtype: str, **options: object) -> None:
    """Images are put into pages; those for a page out of range are dropped."""
    random = np.random.default_rng(0)
    pool = random_bits(random, (LAYERS * PAGES, *shape), dtype)
    pages = np.array([6, PAGES, 1, -1, 0, -PAGES], np.int32)
    images = random_bits(random, (LAYERS, len(pages), *shape), dtype)
    expected = pool.copy()
    for layer in range(LAYERS):
        for index in (0, 2, 4):
            expected[layer * PAGES + pages[index]] = images[layer, index]
    same_bits(write(*_on_device(pool, pages, images), num_pages=PAGES, **options), expected, "pool")


def check_scrub(scrub: Callable, shape: tuple[int, ...], dtype: str, **options: object) -> None:
    """Pages are zeroed in all layers, and no other."""
    pool = random_bits(np.random.default_rng(0), (LAYERS * PAGES, *shape), dtype)
    expected = pool.copy()
    for layer in range(0, LAYERS * PAGES, PAGES):
        expected[[layer + 2, layer + 6]] = 0
    pages = np.array([2, PAGES, -1, 6, 2**30], np.int32)
    same_bits(scrub(*_on_device(pool, pages), num_pages=PAGES, **options), expected, "pool")


def _on_device(*arrays: np.ndarray) -> list[jax.Array]:
    return [jax.numpy.asarray(array) for array in arrays]


def same_bits(got: object, expected: np.ndarray, name: str) -> None:
    """Raises AssertionError, saying where, unless both arrays are the same in shape, dtype and every bit."""
    array = np.asarray(got)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype), f"{name}: {array.shape} of {array.dtype}"
    word = np.dtype(f"uint{8 * expected.dtype.itemsize}")
    differ = np.argwhere(np.ascontiguousarray(array).view(word) != np.ascontiguousarray(expected).view(word))
    assert not len(differ), f"{name}: {len(differ)} of {array.size} elements differ, the first at {tuple(differ[0])}"
