"""The contract of every paged attention kernel: poisoned problems, and the float64 answer they must give.

A problem is built from contiguous keys and values, which alone the oracle sees. They are then scattered into a pool
where everything a kernel must not use is poison: NaN in every slot that no query sees, in every page that no row maps,
in every other layer, in the padding lanes and in places of a tile without a query; ids that no pool has in the unused
entries of the page table. A kernel that lets any of it near its result answers NaN, or faults.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from pallas_kernels.arguments import Attention, Scales, Tiles

UNUSED_ENTRY = 2**30  # in page table entries that no query may follow
LAYERS, LAYER = 3, 1  # the problem lives in the middle one; the others are NaN
BOUNDS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-5}  # on ‖out − expected‖ / ‖expected‖, query by query
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
}


@dataclass(frozen=True)
class Case:
    """The shape of one problem. `tiles` holds (row, queries, context); row == len(lengths) marks a tile of padding."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int  # of keys, and of values unless `value_dim` is given
    page_size: int
    dtype: str  # of queries, and of the pool unless `pool_dtype` is given
    lengths: tuple[int, ...]
    tiles: tuple[tuple[int, int, int], ...]
    tokens: int = 1  # places of a tile
    value_dim: int | None = None
    pool_dtype: str | None = None
    scales: Literal["tensor", "head", "token"] = "tensor"  # of a quantised pool
    window: int | None = None
    kept: int = 0
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def stored_dtype(self) -> np.dtype:
        return DTYPES[self.pool_dtype or self.dtype]

    @property
    def quantised(self) -> bool:
        return self.pool_dtype is not None

    def change(self, suffix: str, **fields: Any) -> "Case":
        """This case with other fields, and a name that says so."""
        return replace(self, name=f"{self.name}-{suffix}", **fields)


@dataclass(frozen=True)
class Problem:
    """The arguments of a kernel, and `expected`, the exact answer."""

    case: Case
    q: Float[np.ndarray, "tiles tokens q_heads key_dim"]
    pool: Shaped[np.ndarray, "total_pages kv_heads page_size lanes"]
    pages: Int32[np.ndarray, "rows width"]
    tiles: Tiles
    page_offset: Int32[np.ndarray, ""]
    attention: Attention
    sinks: Float32[np.ndarray, " q_heads"] | None
    scales: Scales | None
    expected: Float[np.ndarray, "tiles tokens q_heads value_dim"]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The positional arguments of a kernel, in order."""
        return self.q, self.pool, self.pages, self.tiles, self.page_offset

    @property
    def traced(self) -> dict[str, Any]:
        """The keyword arguments that are arrays."""
        return {"sinks": self.sinks, "scales": self.scales}


def ragged(heads: str, head_dim: int, page_size: int, dtype: str) -> Case:
    """One query a tile, over every length near a page boundary; then tiles that share a row; then padding."""
    q_heads, kv_heads = map(int, heads.split(":"))
    page = page_size
    lengths = (page + 1, 0, 1, page, page - 1, 5 * page + 3)
    last = len(lengths) - 1
    one_each = [(row, 1, length) for row, length in enumerate(lengths)]
    sharing = [(last, 1, 2 * page), (last, 1, 1), (0, 1, page), (last, 1, 4 * page + 7)]
    padding = [(len(lengths), 0, 0)]
    tiles = (*one_each[:3], *padding, *one_each[3:], *sharing, *padding)
    name = f"ragged-{heads}x{head_dim}-page{page}-{dtype}"
    return Case(name, q_heads, kv_heads, head_dim, page, dtype, lengths, tiles)


def chunks(heads: str, head_dim: int, page_size: int, dtype: str, tokens: int) -> Case:
    """Tiles of up to `tokens` queries: a whole prompt, the middle of one, one token, a first token, none, padding."""
    q_heads, kv_heads = map(int, heads.split(":"))
    lengths = (tokens + page_size + 2, tokens, 1, 2 * page_size, 0)
    tiles = (
        (0, tokens, tokens),
        (0, min(page_size + 2, tokens), lengths[0]),
        (1, max(1, tokens - 1), lengths[1]),
        (2, 1, 1),
        (5, 0, 0),
        (3, 1, 2 * page_size),
        (4, 0, 0),
        (3, min(3, tokens), page_size + 1),
    )
    name = f"chunks{tokens}-{heads}x{head_dim}-page{page_size}-{dtype}"
    return Case(name, q_heads, kv_heads, head_dim, page_size, dtype, lengths, tiles, tokens)


def long(heads: str, head_dim: int, page_size: int, dtype: str, pages: int) -> Case:
    """A row of many pages beside a short one, for kernels that take the page table in slices."""
    q_heads, kv_heads = map(int, heads.split(":"))
    lengths = (page_size * pages - 3, 5)
    tiles = ((0, 1, lengths[0]), (1, 1, lengths[1]))
    name = f"long-{heads}x{head_dim}-page{page_size}-{dtype}"
    return Case(name, q_heads, kv_heads, head_dim, page_size, dtype, lengths, tiles)


def nothing_to_read() -> Case:
    """Padding and empty rows only: the answer is zero and no page is mapped."""
    return Case("nothing", 4, 2, 64, 16, "bfloat16", (0, 0), ((0, 1, 0), (2, 0, 0), (1, 0, 0)))


SHAPES = (
    ragged("9:3", 64, 16, "bfloat16"),
    ragged("9:3", 64, 16, "float32"),
    ragged("32:8", 128, 16, "bfloat16"),
    ragged("6:2", 128, 32, "float32"),
    ragged("8:1", 128, 64, "bfloat16"),
    ragged("8:1", 128, 16, "float16"),
    ragged("1:1", 64, 16, "bfloat16"),
    ragged("1:1", 128, 128, "float32"),
    ragged("4:2", 80, 16, "bfloat16"),
    ragged("2:1", 96, 32, "float32"),
    ragged("2:1", 112, 16, "float16"),
    ragged("3:1", 192, 16, "bfloat16").change("value128", value_dim=128),
    ragged("2:1", 256, 16, "bfloat16"),
    long("2:1", 64, 16, "bfloat16", pages=131),
    long("3:1", 128, 16, "float32", pages=260),
    nothing_to_read(),
)
TILES = (
    chunks("6:2", 64, 16, "bfloat16", 4),
    chunks("2:1", 128, 16, "float32", 8),
    chunks("2:1", 64, 16, "bfloat16", 40),
    chunks("8:2", 128, 32, "float16", 5),
)
MASKS = (
    ragged("4:2", 64, 16, "bfloat16").change("window20", window=20),
    ragged("2:1", 128, 16, "float32").change("window1", window=1),
    chunks("4:2", 64, 16, "bfloat16", 6).change("window33", window=33),
    long("2:1", 64, 16, "bfloat16", pages=70).change("window40-kept4", window=40, kept=4),
    chunks("2:1", 64, 16, "float32", 20).change("window17-kept18", window=17, kept=18),
    ragged("6:2", 64, 16, "bfloat16").change("sinks", sinks=True),
    ragged("4:2", 128, 16, "float32").change("soft-cap", soft_cap=2.0),
    chunks("4:2", 64, 16, "bfloat16", 4).change("all", window=21, kept=3, soft_cap=5.0, sinks=True),
)
QUANTISED = (
    ragged("4:2", 64, 16, "bfloat16").change("int8-tensor", pool_dtype="int8"),
    ragged("4:2", 128, 32, "bfloat16").change("int8-token", pool_dtype="int8", scales="token"),
    ragged("6:3", 64, 16, "bfloat16").change("e4m3-head", pool_dtype="float8_e4m3fn", scales="head"),
    ragged("2:2", 64, 64, "float16").change("e4m3-token", pool_dtype="float8_e4m3fn", scales="token"),
    ragged("4:2", 128, 16, "float32").change("e5m2-tensor", pool_dtype="float8_e5m2"),
    ragged("2:1", 80, 16, "float32").change("int8-token", pool_dtype="int8", scales="token"),
    chunks("4:2", 64, 16, "bfloat16", 6).change(
        "all-int8-token", pool_dtype="int8", scales="token", window=21, kept=3, soft_cap=5.0, sinks=True
    ),
    long("2:1", 64, 16, "bfloat16", pages=70).change("e5m2-head", pool_dtype="float8_e5m2", scales="head"),
)
CASES = (*SHAPES, *TILES, *MASKS, *QUANTISED)


def make_problem(case: Case, *, lane_multiple: int = 1, seed: int = 0) -> Problem:
    """The poisoned problem of a case, the same for the same seed. Lanes are rounded up to `lane_multiple`."""
    random = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    rows, longest = len(case.lengths), max(case.lengths)
    key_dim, value_dim = case.head_dim, case.value_dim or case.head_dim

    keys = _stored(random, (rows, case.kv_heads, longest, key_dim), case.stored_dtype)
    values = _stored(random, (rows, case.kv_heads, longest, value_dim), case.stored_dtype)
    attention = Attention(value_dim, key_dim**-0.5, case.window, case.kept, case.soft_cap)
    seen = _seen(case)
    # Logits of spread 3: the running maximum moves often.
    q = (3 * random.standard_normal((len(case.tiles), case.tokens, case.q_heads, key_dim))).astype(dtype)
    for tile, (_, queries, _) in enumerate(case.tiles):
        q[tile, queries:] = np.nan
    sinks = random.normal(1, 2, case.q_heads).astype(np.float32) if case.sinks else None
    used = [_any_query(case, seen, row) for row in range(rows)]
    scales_of_slots = _scales(random, case, longest)
    pool, pages, scale_pools = _scatter(keys, values, scales_of_slots, used, case, lane_multiple, random)
    true_keys, true_values = keys.astype(np.float64), values.astype(np.float64)
    if case.quantised:
        key_scale, value_scale = (np.broadcast_to(scale, keys.shape[:3])[..., None] for scale in scales_of_slots)
        true_keys, true_values = true_keys * key_scale, true_values * value_scale
    tiles = np.array(case.tiles, np.int32).reshape(-1, 3).T
    return Problem(
        case=case,
        q=q,
        pool=pool,
        pages=pages,
        tiles=Tiles(*map(jnp.asarray, tiles)),
        page_offset=np.array(LAYER * (pool.shape[0] // LAYERS), np.int32),
        attention=attention,
        sinks=sinks,
        scales=_as_scales(case, scales_of_slots, scale_pools),
        expected=_attention(q, true_keys, true_values, seen, sinks, case, attention),
    )


def _stored(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Normal numbers in the dtype of the pool; int8 codes over most of its range."""
    numbers = random.standard_normal(shape)
    return np.clip(np.rint(40 * numbers), -127, 127).astype(dtype) if dtype == np.int8 else numbers.astype(dtype)


def _scales(random: np.random.Generator, case: Case, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """What keys and values are multiplied by, in shapes that broadcast to [rows, kv_heads, positions]."""
    shape = {
        "tensor": (),
        "head": (case.kv_heads, 1),
        "token": (len(case.lengths), case.kv_heads, longest),
    }[case.scales]
    size = 1 / 40 if case.stored_dtype == np.int8 else 1.0
    key, value = (np.float32(size * random.uniform(0.5, 1.5, shape)) for _ in range(2))
    return np.asarray(key), np.asarray(value)


def _as_scales(case: Case, of_slots: tuple[np.ndarray, ...], pools: list[np.ndarray]) -> Scales | None:
    if not case.quantised:
        return None
    if case.scales == "token":
        return Scales(*map(jnp.asarray, pools))
    return Scales(*(jnp.asarray(scale.reshape(-1) if case.scales == "head" else scale) for scale in of_slots))


def _seen(case: Case) -> Bool[np.ndarray, "tiles tokens positions"]:
    """Which positions each place of each tile sees."""
    seen = np.zeros((len(case.tiles), case.tokens, max(case.lengths)), bool)
    for tile, (_, queries, context) in enumerate(case.tiles):
        for place in range(queries):
            end = max(0, context - queries + 1 + place)
            begin = 0 if case.window is None else max(0, end - case.window)
            seen[tile, place, begin:end] = True
            seen[tile, place, : min(case.kept, end)] = True
    return seen


def _any_query(case: Case, seen: np.ndarray, row: int) -> Bool[np.ndarray, " positions"]:
    """Which positions of a row some query sees."""
    tiles = [tile for tile, (of_row, _, _) in enumerate(case.tiles) if of_row == row]
    return seen[tiles].any(axis=(0, 1))


def _scatter(
    keys: np.ndarray,
    values: np.ndarray,
    scales: tuple[np.ndarray, np.ndarray],
    used: list[np.ndarray],
    case: Case,
    lane_multiple: int,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Lays the slots somebody sees out in permuted pages of a pool that is poison elsewhere.

    Returns (pool, page table, per-token scales of keys and of values).
    """
    size, key_dim, used_lanes = case.page_size, keys.shape[-1], keys.shape[-1] + values.shape[-1]
    columns = [-(-length // size) for length in case.lengths]
    pages_per_layer = sum(columns) + 3
    lanes, scale_lanes = (-(-n // lane_multiple) * lane_multiple for n in (used_lanes, case.kv_heads * size))
    poison = -128 if case.stored_dtype == np.int8 else np.nan  # int8 has no NaN; its scales have
    pool = np.full((LAYERS * pages_per_layer, case.kv_heads, size, lanes), poison, keys.dtype)
    pages = np.full((len(case.lengths), max(columns) + 2), UNUSED_ENTRY, np.int32)
    scale_pools = [np.full((len(pool), scale_lanes), np.nan, np.float32) for _ in range(2)]

    free = iter(random.permutation(pages_per_layer))
    for row in range(len(case.lengths)):
        for column in range(columns[row]):
            slots = np.flatnonzero(used[row][column * size : (column + 1) * size])
            if not slots.size:
                continue
            pages[row, column] = page = next(free)
            positions = column * size + slots
            place = LAYER * pages_per_layer + page
            pool[place][:, slots, :key_dim] = keys[row][:, positions]
            pool[place][:, slots, key_dim:used_lanes] = values[row][:, positions]
            if case.scales == "token":
                lanes_of_slots = np.arange(case.kv_heads)[:, None] * size + slots
                for scale_pool, scale in zip(scale_pools, scales, strict=True):
                    scale_pool[place, lanes_of_slots] = scale[row][:, positions]
    return pool, pages, scale_pools


def _attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    seen: np.ndarray,
    sinks: np.ndarray | None,
    case: Case,
    attention: Attention,
) -> np.ndarray:
    """Softmax attention of each query over what it sees, in float64, from contiguous keys and values."""
    out = np.zeros((*q.shape[:3], values.shape[-1]))
    for tile, (row, queries, _) in enumerate(case.tiles):
        for place in range(queries):
            positions = np.flatnonzero(seen[tile, place])
            if not positions.size:
                continue
            heads = q[tile, place].astype(np.float64).reshape(case.kv_heads, -1, q.shape[-1])
            logits = attention.scale * np.einsum("hgd,hkd->hgk", heads, keys[row][:, positions])
            if attention.soft_cap is not None:
                logits = attention.soft_cap * np.tanh(logits / attention.soft_cap)
            top = logits.max(-1, keepdims=True)
            weights = np.exp(logits - top)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks.astype(np.float64).reshape(case.kv_heads, -1, 1) - top)
            answer = np.einsum("hgk,hkd->hgd", weights / total, values[row][:, positions])
            out[tile, place] = answer.reshape(case.q_heads, -1)
    return out


def check(problem: Problem, out: Any) -> None:
    """Raises AssertionError unless `out` is the problem's answer within the bound of its dtype."""
    out = np.asarray(out)
    assert out.shape == problem.expected.shape, f"{out.shape=}, expected {problem.expected.shape}"
    assert out.dtype == problem.q.dtype, f"{out.dtype=}, expected {problem.q.dtype}"
    out = out.astype(np.float64)
    seen = _seen(problem.case).any(axis=2)
    bound = BOUNDS[problem.case.dtype]
    for tile, place in np.ndindex(*out.shape[:2]):
        got, expected = out[tile, place], problem.expected[tile, place]
        row, queries, context = problem.case.tiles[tile]
        label = f"tile {tile} ({row=}, {queries=}, {context=}), place {place}"
        assert not np.isnan(got).any(), f"{label}: {np.isnan(got).sum()} of {got.size} values are NaN"
        if not seen[tile, place]:
            assert (got == 0).all(), f"{label}: sees nothing and must be exactly zero, got up to {np.abs(got).max()}"
            continue
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error <= bound, f"{label}: relative error {error:.2e} is above {bound:.0e}"


def run(kernel: Callable, case: Case, *, lane_multiple: int = 1, **options: object) -> None:
    """Runs `kernel(*arrays, attention=…, sinks=…, scales=…, **options)` on a case and checks its answer.

    `kernel` may be jitted with a static `attention`.
    """
    problem = make_problem(case, lane_multiple=lane_multiple)
    check(problem, kernel(*problem.arrays, attention=problem.attention, **problem.traced, **options))
