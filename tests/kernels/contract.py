"""The contract of every paged decode kernel: poisoned problems, and the float64 answer they must give.

A problem is built from contiguous keys and values, which alone the oracle sees. They are then scattered into a pool
where everything a kernel must not read is poison: NaN in every slot at or past a row's length, in every page that no
row maps, in every other layer and in the padding lanes; ids that no pool has in the unused entries of the page table.
A kernel that lets any of it near its result answers NaN, or faults.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32

UNUSED_ENTRY = 2**30  # in page table entries that no query may follow
LAYERS, LAYER = 3, 1  # the problem lives in the middle one; the others are NaN
BOUNDS = {"bfloat16": 5e-3, "float32": 1e-5}  # on ‖out − expected‖ / ‖expected‖, query by query
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Case:
    """The shape of one problem. `queries` holds (row, context) pairs; row == len(lengths) marks a padding query."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int  # of keys, and of values unless `value_dim` is given
    page_size: int
    dtype: str
    lengths: tuple[int, ...]
    queries: tuple[tuple[int, int], ...]
    value_dim: int | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Problem:
    """The arguments of a kernel, as numpy arrays, and `expected`, the exact answer."""

    case: Case
    q: Float[np.ndarray, "queries q_heads key_dim"]
    pool: Float[np.ndarray, "total_pages kv_heads page_size lanes"]
    pages: Int32[np.ndarray, "rows width"]
    row: Int32[np.ndarray, "queries"]
    context: Int32[np.ndarray, "queries"]
    page_offset: Int32[np.ndarray, ""]
    value_dim: int
    scale: float
    expected: Float[np.ndarray, "queries q_heads value_dim"]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The positional arguments of a kernel, in order."""
        return self.q, self.pool, self.pages, self.row, self.context, self.page_offset

    @property
    def static(self) -> dict[str, float]:
        """The keyword arguments that every kernel takes."""
        return {"value_dim": self.value_dim, "scale": self.scale}


def ragged(heads: str, head_dim: int, page_size: int, dtype: str) -> Case:
    """One query a row, over every length near a page boundary; then queries that share a row; then padding."""
    q_heads, kv_heads = map(int, heads.split(":"))
    page = page_size
    lengths = (page + 1, 0, 1, page, page - 1, 5 * page + 3)
    last = len(lengths) - 1
    one_each = [(row, length) for row, length in enumerate(lengths)]
    sharing = [(last, 2 * page), (last, 1), (0, page), (last, 4 * page + 7)]
    padding = [(len(lengths), 0)]
    queries = (*one_each[:3], *padding, *one_each[3:], *sharing, *padding)
    name = f"ragged-{heads}x{head_dim}-page{page}-{dtype}"
    return Case(name, q_heads, kv_heads, head_dim, page, dtype, lengths, queries)


def long(heads: str, head_dim: int, page_size: int, dtype: str, pages: int) -> Case:
    """A row of many pages beside a short one, for kernels that take the page table in slices."""
    q_heads, kv_heads = map(int, heads.split(":"))
    lengths = (page_size * pages - 3, 5)
    queries = ((0, lengths[0]), (1, lengths[1]))
    name = f"long-{heads}x{head_dim}-page{page_size}-{dtype}"
    return Case(name, q_heads, kv_heads, head_dim, page_size, dtype, lengths, queries)


def nothing_to_read() -> Case:
    """Padding and empty rows only: the answer is zero and no page is mapped."""
    return Case("nothing", 4, 2, 64, 16, "bfloat16", (0, 0), ((0, 0), (2, 0), (1, 0)))


CASES = (
    ragged("9:3", 64, 16, "bfloat16"),
    ragged("9:3", 64, 16, "float32"),
    ragged("32:8", 128, 16, "bfloat16"),
    ragged("32:8", 128, 32, "float32"),
    ragged("8:1", 128, 64, "bfloat16"),
    ragged("8:1", 128, 16, "float32"),
    ragged("1:1", 64, 16, "bfloat16"),
    ragged("1:1", 128, 128, "float32"),
    ragged("9:3", 64, 128, "bfloat16"),
    ragged("4:2", 64, 64, "float32"),
    long("2:1", 64, 16, "bfloat16", pages=131),
    long("3:1", 128, 16, "float32", pages=260),
    nothing_to_read(),
)


def make_problem(case: Case, *, lane_multiple: int = 1, seed: int = 0) -> Problem:
    """The poisoned problem of a case, the same for the same seed. Lanes are rounded up to `lane_multiple`."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    rows, longest = len(case.lengths), max(case.lengths)
    key_dim, value_dim = case.head_dim, case.value_dim or case.head_dim

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    keys = normal(rows, case.kv_heads, longest, key_dim)
    values = normal(rows, case.kv_heads, longest, value_dim)
    q = normal(len(case.queries), case.q_heads, key_dim)
    q = (q * np.asarray(3, dtype)).astype(dtype)  # logits of spread 3: the running maximum moves often
    pool, pages = _scatter(keys, values, case, lane_multiple, random)
    scale = key_dim**-0.5
    return Problem(
        case=case,
        q=q,
        pool=pool,
        pages=pages,
        row=np.array([row for row, _ in case.queries], np.int32),
        context=np.array([context for _, context in case.queries], np.int32),
        page_offset=np.array(LAYER * (pool.shape[0] // LAYERS), np.int32),
        value_dim=value_dim,
        scale=scale,
        expected=_attention(q, keys, values, case, scale),
    )


def _scatter(
    keys: np.ndarray, values: np.ndarray, case: Case, lane_multiple: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Lays every row's tokens out in permuted pages of a pool that is NaN elsewhere; returns (pool, page table)."""
    size, key_dim, used_lanes = case.page_size, keys.shape[-1], keys.shape[-1] + values.shape[-1]
    mapped = [-(-length // size) for length in case.lengths]
    pages_per_layer = sum(mapped) + 3
    width = max(mapped) + 2
    lanes = -(-used_lanes // lane_multiple) * lane_multiple
    pool = np.full((LAYERS * pages_per_layer, case.kv_heads, size, lanes), np.nan, keys.dtype)
    pages = np.full((len(case.lengths), width), UNUSED_ENTRY, np.int32)

    free = iter(random.permutation(pages_per_layer))
    for row, length in enumerate(case.lengths):
        for column in range(mapped[row]):
            pages[row, column] = page = next(free)
            slots = slice(column * size, min((column + 1) * size, length))
            filled = slots.stop - slots.start
            block = pool[LAYER * pages_per_layer + page]
            block[:, :filled, :key_dim] = keys[row, :, slots]
            block[:, :filled, key_dim:used_lanes] = values[row, :, slots]
    return pool, pages


def _attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, case: Case, scale: float) -> np.ndarray:
    """Softmax attention of each query over its own context, in float64, from contiguous keys and values."""
    group = case.q_heads // case.kv_heads
    out = np.zeros((*q.shape[:2], values.shape[-1]))
    for index, (row, context) in enumerate(case.queries):
        if context == 0:
            continue
        heads = q[index].astype(np.float64).reshape(case.kv_heads, group, -1)
        seen_keys = keys[row, :, :context].astype(np.float64)
        seen_values = values[row, :, :context].astype(np.float64)
        logits = scale * np.einsum("hgd,hkd->hgk", heads, seen_keys)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[index] = np.einsum("hgk,hkd->hgd", weights, seen_values).reshape(case.q_heads, -1)
    return out


def check(problem: Problem, out: np.ndarray) -> None:
    """Raises AssertionError unless `out` is the problem's answer within the bound of its dtype."""
    out = np.asarray(out)
    assert out.shape == problem.expected.shape, f"{out.shape=}, expected {problem.expected.shape}"
    assert out.dtype == problem.q.dtype, f"{out.dtype=}, expected {problem.q.dtype}"
    out = out.astype(np.float64)
    bound = BOUNDS[problem.case.dtype]
    for index, (got, expected) in enumerate(zip(out, problem.expected, strict=True)):
        label = f"query {index} (row {problem.row[index]}, context {problem.context[index]})"
        assert not np.isnan(got).any(), f"{label}: {np.isnan(got).sum()} of {got.size} values are NaN"
        if problem.context[index] == 0:
            assert (got == 0).all(), f"{label}: an empty query must be exactly zero, got up to {np.abs(got).max()}"
            continue
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error <= bound, f"{label}: relative error {error:.2e} is above {bound:.0e}"


def run(kernel: Callable, case: Case, *, lane_multiple: int = 1, **options: object) -> None:
    """Runs `kernel(*arrays, value_dim=…, scale=…, **options)` on a case and checks its answer."""
    problem = make_problem(case, lane_multiple=lane_multiple)
    check(problem, kernel(*problem.arrays, **problem.static, **options))
