"""What every paged attention kernel takes, and what each asks of it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

QUERY_DTYPES = ("bfloat16", "float16", "float32")
QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Attention:
    """What is computed of queries, keys and values. Static: another value is another program.

    Attributes:
      value_dim: lanes of a value.
      scale: what logits are multiplied by.
      window: a query sees the last `window` positions, itself included; None: all before it.
      kept: the first `kept` positions stay visible beyond the window, as in StreamingLLM (Xiao et al. 2023, §3.2).
      soft_cap: logits become soft_cap · tanh(logits / soft_cap), as in Gemma 2 (2024, §2.3); None: they stay.
    """

    value_dim: int
    scale: float
    window: int | None = None
    kept: int = 0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}; make it at least 1, or None to see every position")
        if self.kept < 0 or (self.kept and self.window is None):
            raise ValueError(f"kept={self.kept} with window={self.window}; positions are kept beyond a window only")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap={self.soft_cap}; make it above 0, or None")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Tiles:
    """Which row and which positions each tile of queries reads. Its queries are consecutive tokens of one row.

    Attributes:
      row: the row of each tile; tiles may share one. Out of range for a tile without queries.
      queries: how many of the tile's places hold a query: the first ones. 0: none does.
      context: how many positions the last of them sees, at most width × page_size; each one before sees one less, and
        none below 0. A query that sees nothing answers exactly zero, and so does a place without a query.
    """

    row: Int32[Array, " tiles"]
    queries: Int32[Array, " tiles"]
    context: Int32[Array, " tiles"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Runs:
    """The pages of each row as a short list of runs: logical pages that are physically adjacent too.

    Entries at or past `num_runs` hold anything.

    Attributes:
      starts: physical page at which a run begins.
      ends: logical page at which it ends.
      num_runs: runs a row has.
    """

    starts: Int32[Array, "rows max_runs"]
    ends: Int32[Array, "rows max_runs"]
    num_runs: Int32[Array, " rows"]

    @property
    def rows(self) -> int:
        return self.starts.shape[0]

    @property
    def max_runs(self) -> int:
        return self.starts.shape[1]

    @property
    def counts(self) -> Int32[Array, "rows max_runs"]:
        """Pages in each run; 0 at and past `num_runs`.  Made from `ends`, O(rows · max_runs)."""
        begins = jnp.concatenate([jnp.zeros((self.rows, 1), jnp.int32), self.ends[:, :-1]], axis=1)
        exists = jnp.arange(self.max_runs, dtype=jnp.int32) < self.num_runs[:, None]
        return jnp.where(exists, self.ends - begins, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Scales:
    """What the stored keys and values are multiplied by. Traced: a new scale does not recompile.

    Each is one number for the pool, one a KV head, or one a head and token:
    `[total_pages, scale_lanes]`, where head h and slot t of a page stand at lane h · page_size + t and anything may
    stand beyond; on TPU `scale_lanes` is a multiple of 128.
    """

    key: Float32[Array, "*shape"]
    value: Float32[Array, "*shape"]


def check_arguments(
    q: Float[Array, "tiles tokens q_heads key_dim"],
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
    pages: Int32[Array, "rows width"] | Runs,
    tiles: Tiles,
    *,
    attention: Attention,
    sinks: Float32[Array, " q_heads"] | None,
    scales: Scales | None,
    lane_multiple: int,
) -> None:
    """Raises ValueError, saying what to change, unless shapes, dtypes and sizes are what the kernels take.

    `pages` is where the pages of rows are, one by one or run by run; `lane_multiple` is what the last axis of the pool
    is rounded up to on this backend.
    """
    if q.ndim != 4 or pool.ndim != 4:
        raise ValueError(
            f"{q.shape=}, {pool.shape=}; pass q [tiles, tokens, q_heads, key_dim] and "
            "pool [total_pages, kv_heads, page_size, lanes]"
        )
    number, _, q_heads, key_dim = q.shape
    _, kv_heads, page_size, lanes = pool.shape
    value_dim = attention.value_dim
    if 0 in (*q.shape, *pool.shape):
        raise ValueError(f"{q.shape=}, {pool.shape=}; no dimension may be 0: do not call the kernel")
    _check_dtypes(q, pool, scales)
    if isinstance(pages, Runs):
        _check_runs(pages)
    else:
        _check_table("pages", pages, "[rows, width]")
    for name, array in (("row", tiles.row), ("queries", tiles.queries), ("context", tiles.context)):
        _check_int32(name, array)
        if array.shape != (number,):
            raise ValueError(f"{name}.shape={array.shape}; it must have one entry for each of the {number} tiles of q")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads=} is not a multiple of {kv_heads=}; repeat KV heads or pad query heads")
    if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        raise ValueError(f"{key_dim=}, {value_dim=}; heads of {HEAD_DIMS} are supported: pad them, or use the XLA path")
    expected = -(-(key_dim + value_dim) // lane_multiple) * lane_multiple
    if lanes != expected:
        raise ValueError(f"{lanes=} of the pool; {key_dim=} and {value_dim=} need {expected}: lay the pool out so")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=}; make pages of 16, 32, 64 or 128 tokens")
    if sinks is not None and (sinks.shape != (q_heads,) or sinks.dtype != jnp.float32):
        raise ValueError(f"{sinks.shape=}, {sinks.dtype=}; sinks are float32, one for each of the {q_heads=}")
    if scales is not None:
        _check_scales(scales, pool, lane_multiple)


def _check_runs(runs: Runs) -> None:
    for name in ("starts", "ends"):
        _check_table(f"runs.{name}", getattr(runs, name), "[rows, max_runs]")
    _check_int32("runs.num_runs", runs.num_runs)
    if runs.ends.shape != runs.starts.shape or runs.num_runs.shape != runs.starts.shape[:1]:
        raise ValueError(
            f"{runs.starts.shape=}, {runs.ends.shape=}, {runs.num_runs.shape=}; "
            "starts and ends have one shape [rows, max_runs], and num_runs has one entry a row"
        )


def _check_table(name: str, table: Array, axes: str) -> None:
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"{name}.shape={table.shape}; pass {axes}, neither 0: without pages do not call the kernel")
    _check_int32(name, table)


def _check_int32(name: str, array: Array) -> None:
    if array.dtype != jnp.int32:
        raise ValueError(f"{name}.dtype={array.dtype}; cast it to int32")


def _check_dtypes(q: Array, pool: Array, scales: Scales | None) -> None:
    if q.dtype not in QUERY_DTYPES:
        raise ValueError(f"{q.dtype=}; cast q to one of {', '.join(QUERY_DTYPES)}")
    if pool.dtype in QUANTISED_DTYPES:
        if scales is None:
            raise ValueError(f"{pool.dtype=} without scales; pass Scales(key, value), ones if need be")
    elif pool.dtype != q.dtype:
        raise ValueError(
            f"{q.dtype=}, {pool.dtype=}; give both one dtype, or the pool one of {', '.join(QUANTISED_DTYPES)}: cast q"
        )
    elif scales is not None:
        raise ValueError(f"scales for {pool.dtype=}; only {', '.join(QUANTISED_DTYPES)} are scaled: pass None")


def _check_scales(scales: Scales, pool: Array, lane_multiple: int) -> None:
    total_pages, kv_heads, page_size, _ = pool.shape
    least = kv_heads * page_size
    for name, scale in (("key", scales.key), ("value", scales.value)):
        per_token = scale.ndim == 2 and scale.shape[0] == total_pages
        if scale.dtype != jnp.float32 or not (scale.shape in ((), (kv_heads,)) or per_token):
            raise ValueError(
                f"scales.{name}: {scale.shape=}, {scale.dtype=}; float32 of shape (), ({kv_heads},) or "
                f"({total_pages}, scale_lanes)"
            )
        if per_token and (scale.shape[1] < least or scale.shape[1] % lane_multiple):
            raise ValueError(
                f"scales.{name}: {scale.shape=}; a page has {least} scales: make the last axis at least that, "
                f"and a multiple of {lane_multiple}"
            )
