"""The memory ledger: every part of a device's memory as one line, with its formula and where its numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.architecture import Architecture
from kvjax.capacity.parallel import Parallelism

LOGITS_COPIES = 3
"""Logits, their sorted copy and their probabilities, as float32: what sampling holds at once."""
HIDDEN_COPIES = 6
"""Hidden states alive in a layer: its input, the normed one, the attention's output, the sum, and two being moved."""
KV_SPLITS = 16
"""Parts into which a decode kernel may split one sequence, each with its own partial result."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights.

    Attributes:
      bytes: all of them.
      parameters: their number, if it is known.
      format: their format, for people.
      note: where the number comes from.
    """

    bytes: int
    parameters: int | None
    format: str
    note: str


@dataclass(frozen=True, slots=True)
class Line:
    """One part of a device's memory.

    Attributes:
      name: "weights", "kv_pool", …
      bytes: how much.
      formula: how it was computed, with the numbers.
      source: who says so: a config field, a flag, a measurement, or an assumption.
    """

    name: str
    bytes: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """All lines of one device; they do not overlap."""

    lines: tuple[Line, ...]

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

    def bytes_of(self, *names: str) -> int:
        """Bytes of some lines; names without a line count nothing."""
        return sum(line.bytes for line in self.lines if line.name in names)


@dataclass(frozen=True, slots=True)
class ExecutableMemory:
    """What a compiled executable says of itself, in bytes.

    Attributes:
      arguments, outputs, aliased, temporaries, code: as in jax's `memory_analysis()`.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @classmethod
    def of(cls, compiled: Any) -> ExecutableMemory:
        """Of `jax.jit(f).lower(…).compile()`.

        Raises:
          ValueError: the backend gives no memory analysis.
        """
        analysis = compiled.memory_analysis()
        if analysis is None:
            raise ValueError("this backend gives no memory analysis of a compiled executable")
        return cls(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
        )

    @property
    def peak(self) -> int:
        """Arguments, results that are not written over them, temporaries and code: all that is alive in a call."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def lines(self) -> tuple[Line, Line]:
        """In place of the predicted lines."""
        transient = self.temporaries + self.outputs - self.aliased
        source = "measured: memory_analysis() of the executable"
        return (
            Line("transient", transient, "temporaries + results not aliased to arguments", source),
            Line("executable", self.code, "generated code", source),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step that is run.

    Attributes:
      tokens: packed tokens.
      samples: rows that get logits.
      element_bytes: of a hidden state's elements.
      scanned: layers run in a `lax.scan`, as kvjax's own models do: one layer's weights are copied out of the stack.
    """

    tokens: int
    samples: int
    element_bytes: int = 2
    scanned: bool = False


def transient_line(architecture: Architecture, step: Step, parallel: Parallelism, weights: int) -> Line:
    """Activations and logits of the largest step; `weights` are the bytes of all weights on a device."""
    hidden, mlp = architecture.hidden_size, architecture.mlp_width or 4 * architecture.hidden_size
    activations = step.tokens * (HIDDEN_COPIES * hidden + 2 * -(-mlp // parallel.tensor)) * step.element_bytes
    logits = step.samples * -(-(architecture.vocabulary or 0) // parallel.tensor) * 4 * LOGITS_COPIES
    layer = weights // parallel.stage_layers(architecture.num_layers) if step.scanned else 0
    formula = (
        f"{step.tokens} tokens × ({HIDDEN_COPIES} · {hidden} + 2 · {mlp}/{parallel.tensor}) · {step.element_bytes} B"
        f" + {step.samples} × {architecture.vocabulary or 0}/{parallel.tensor} logits · 4 B · {LOGITS_COPIES}"
    )
    if step.scanned:
        formula += f" + one layer's weights ({layer} B)"
    return Line(
        "transient", activations + logits + layer, formula, "model of one layer; measure with memory_analysis()"
    )


def workspace_line(architecture: Architecture, rows: int, parallel: Parallelism) -> Line:
    """Partial results of decode kernels that split sequences."""
    heads = -(-architecture.query_heads // parallel.tensor)
    width = max((tensor.width for group in architecture.groups for tensor in group.tensors), default=0)
    total = rows * heads * KV_SPLITS * (width + 2) * 4 if width else 0
    formula = f"{rows} rows × {heads} heads × {KV_SPLITS} splits × ({width} + 2) · 4 B"
    return Line("workspace", total, formula, f"assumption: up to {KV_SPLITS} splits a sequence")


def weights_line(weights: Weights, num_layers: int, parallel: Parallelism, name: str = "weights") -> Line:
    """Weights, split over tensor parallelism and, layer by layer, over pipeline stages."""
    layers = parallel.stage_layers(num_layers)
    share = -(-weights.bytes * layers // (num_layers * parallel.tensor))
    what = f"{weights.bytes} B" if weights.parameters is None else f"{weights.parameters} weights in {weights.format}"
    return Line(name, share, f"{what} · {layers}/{num_layers} layers / tp {parallel.tensor}", weights.note)


def bars(lines: Sequence[Line], total: int, *, width: int = 40) -> list[str]:
    """The lines as horizontal bars of text, as long as their shares of `total`."""
    longest = max((len(line.name) for line in lines), default=0)
    picture = []
    for line in lines:
        share = line.bytes / total if total else 0.0
        filled = min(width, round(share * width))
        picture.append(f"{line.name:<{longest}}  {'█' * filled}{'·' * (width - filled)}  {100 * share:5.1f} %")
    return picture
