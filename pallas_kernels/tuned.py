"""Block sizes that were measured, in place of those that the rules choose: plain data, and where kernels look for it.

The facts of a chip carry it (`with_tuned`); a kernel takes the sizes measured for just its shape, if there are any, and
holds them to what its rule allows. `python -m experiments.tune_blocks` makes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from jaxtyping import Array, Float, Shaped

from pallas_kernels.arguments import Attention, Scales
from pallas_kernels.hardware import GpuFacts, TpuFacts


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the rules look at, and what sizes are measured for. Dtypes by name."""

    kv_heads: int
    lines: int  # query lines of one KV head in a tile: tokens × query heads a KV head
    key_dim: int
    value_dim: int
    page_size: int
    query_dtype: str
    pool_dtype: str
    scales_per_token: int = 0  # how many of keys' and values' scales come per token

    @staticmethod
    def of(
        q: Float[Array, "tiles tokens q_heads key_dim"],
        pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
        attention: Attention,
        scales: Scales | None,
    ) -> AttentionShape:
        """The shape of a call; of arrays, or of anything else with a shape and a dtype."""
        _, tokens, q_heads, key_dim = q.shape
        _, kv_heads, page_size, _ = pool.shape
        per_token = sum(scale.ndim == 2 for scale in (scales.key, scales.value)) if scales else 0
        lines = tokens * (q_heads // kv_heads)
        dims = lines, key_dim, attention.value_dim
        return AttentionShape(kv_heads, *dims, page_size, q.dtype.name, pool.dtype.name, per_token)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The sizes that were best for one shape on one chip, by the names that its kernel gives them."""

    chip: str  # `facts.name`
    shape: AttentionShape
    sizes: tuple[tuple[str, int], ...]


class TunedFileError(ValueError):
    """A file of tuned sizes cannot be used; the message names the file and the field."""


def with_tuned[Facts: TpuFacts | GpuFacts](facts: Facts, tuned: Iterable[Tuned]) -> Facts:
    """The same chip, on which kernels use these sizes. ValueError for sizes of another chip, or of other names."""
    names = {"pages_per_block", "buffers"} if isinstance(facts, TpuFacts) else {"workers", "consumers", "buffers"}
    for one in (tuned := tuple(tuned)):
        if one.chip != facts.name:
            raise ValueError(
                f"sizes tuned on {one.chip!r} are not for {facts.name!r}; tune on this chip, or leave them out"
            )
        if dict(one.sizes).keys() != names:
            raise ValueError(f"sizes of {sorted(dict(one.sizes))}; the kernel of {facts.name} takes {sorted(names)}")
    return replace(facts, tuned=tuned)


def tuned_sizes(facts: TpuFacts | GpuFacts, shape: AttentionShape) -> dict[str, int]:
    """The sizes measured for a shape on a chip; none if there are none."""
    return next((dict(one.sizes) for one in facts.tuned if one.shape == shape), {})


def load_tuned(path: str | Path) -> Tuned:
    """Reads what `experiments.tune_blocks` wrote. TunedFileError, naming the field, for anything else."""
    try:
        record = json.loads(Path(path).read_text())
    except ValueError as error:
        raise TunedFileError(f"{path}: not JSON ({error})") from error
    chip = _field(path, record, "chip", str)
    stated, sizes = (_field(path, record, name, dict) for name in ("shape", "sizes"))
    kinds = {field.name: str if field.type == "str" else int for field in fields(AttentionShape)}
    shape = AttentionShape(**{name: _field(path, stated, name, kind, "shape.") for name, kind in kinds.items()})
    return Tuned(chip, shape, tuple((name, _field(path, sizes, name, int, "sizes.")) for name in sizes))


def as_record(tuned: Tuned) -> dict[str, Any]:
    """What `load_tuned` reads back, for JSON."""
    return {"chip": tuned.chip, "shape": asdict(tuned.shape), "sizes": dict(tuned.sizes)}


def _field(path: str | Path, record: Any, name: str, kind: type, within: str = "") -> Any:
    if not isinstance(record, Mapping) or type(record.get(name)) is not kind:
        got = record.get(name) if isinstance(record, Mapping) else record
        raise TunedFileError(f"{path}: {within}{name} must be {kind.__name__}, got {got!r}")
    return record[name]
