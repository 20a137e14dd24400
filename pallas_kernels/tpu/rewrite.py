"""Rewrites aligned units of an array in HBM, several in flight: each is read, changed and written back.

A unit is the least that a copy may write: a strip of tokens of a page, or a page's row of scales. New tokens come in a
packed list, and neighbours in it that fall into one unit are a run, which is one program's: two that rewrote the same
unit would undo each other's work. Runs are found by the scalar core as it goes, while copies are under way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.hardware import TpuFacts
from pallas_kernels.tpu.block_stream import Ref, Scalar

COPY_SECONDS = 1e-6  # about the latency of a copy: as much is kept in flight as HBM delivers in that time
MIN_BUFFERS, MAX_BUFFERS = 2, 32
NO_UNIT, END = -1, -2  # of a dropped token, and past the last
FIRST, TOKENS = 0, 1  # of a run: the packed index of its first token, and how many it has


@dataclass(frozen=True)
class Unit:
    """How an array is cut into units, and how a token gets into one.

    Attributes:
      tokens: consecutive token positions of a page that one unit holds, aligned; a power of two.
      filled: whether these are all there is to it, so that it need not be read where all of them are new.
      shape: of a unit's buffer in VMEM, in the array's dtype.
      place: the unit of a reference to the array: `place(array, page, first_slot)`.
      merge: puts a token `[…]` of the new ones into the buffer, at a slot of the unit: `merge(buffer, token, slot)`.
    """

    tokens: int
    filled: bool
    shape: tuple[int, ...]
    place: Callable[[Ref, Scalar, Scalar], Ref]
    merge: Callable[[Ref, Ref, Scalar], None]


def rewrite(
    array: Shaped[Array, "total_pages ..."],
    page_size: int,
    page: Int32[Array, " packed"],
    offset: Int32[Array, " packed"],
    new: Shaped[Array, "packed ..."],
    unit: Unit,
    *,
    facts: TpuFacts,
    interpret: bool | pltpu.InterpretParams,
    name: str,
) -> Shaped[Array, "total_pages ..."]:
    """Merges each token `new[i]` into slot `offset[i]` of page `page[i]`; one out of range drops the token.

    In place if `array` is donated. Tokens of one unit must be neighbours in the list, with none dropped between them,
    and no slot may stand twice: else two runs would rewrite one unit.
    """
    cores, units_per_page = facts.tensor_cores, page_size // unit.tokens
    if array.shape[0] * units_per_page >= 2**31:
        raise ValueError(f"{array.shape[0]} pages of {units_per_page} units pass 32 bits: take larger pages")
    buffers = ring_buffers(unit, array.dtype, new, facts)
    scalar_bytes = 2 * 4 * page.shape[0]
    if scalar_bytes > facts.smem_bytes // 2:
        raise ValueError(
            f"{page.shape[0]} packed tokens need {scalar_bytes=} of scalar memory; at most half of {facts.smem_bytes=} "
            f"({facts.name}) is given to them: split them over several calls"
        )
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    call = pl.pallas_call(
        lambda *refs: _kernel(_Runs(unit, units_per_page, cores, *refs)),
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((buffers, *unit.shape), array.dtype),
                pltpu.VMEM((buffers, unit.tokens, *new.shape[1:]), new.dtype),
                pltpu.SMEM((2, buffers), jnp.int32),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SemaphoreType.DMA((buffers,)),
            ],
        ),
        input_output_aliases={3: 0},
        # Every place is in range, as checked below: no copy needs to check it again.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        interpret=interpret,
        name=name,
    )
    # What the scalar core would otherwise work out for every token, and an end that is in no unit.
    in_range = (page >= 0) & (page < array.shape[0]) & (offset >= 0) & (offset < page_size)
    unit_of = jnp.where(in_range, page * units_per_page + offset // unit.tokens, NO_UNIT)
    return call(jnp.append(unit_of, END), offset, new, array)


def ring_buffers(unit: Unit, dtype: jnp.dtype, new: Shaped[Array, "packed ..."], facts: TpuFacts) -> int:
    """How many units are in flight: half being read and half being written, each what HBM delivers in COPY_SECONDS.

    A power of two from MIN_BUFFERS to MAX_BUFFERS, within a quarter of VMEM. ValueError if MIN_BUFFERS do not fit.
    """
    unit_bytes = _bytes(unit.shape, dtype)
    buffer_bytes = unit_bytes + unit.tokens * _bytes(new.shape[1:], new.dtype)
    wanted = 2 * -(-int(facts.hbm_bytes_per_second * COPY_SECONDS) // unit_bytes)
    most = min(facts.vmem_bytes // 4 // buffer_bytes, MAX_BUFFERS)
    if most < MIN_BUFFERS:
        raise ValueError(
            f"{buffer_bytes=} of a unit {unit.shape} and its new tokens; {MIN_BUFFERS} must fit in a quarter of "
            f"{facts.vmem_bytes=} ({facts.name}): take smaller pages, or shard the heads"
        )
    return 1 << max(MIN_BUFFERS, min(wanted, most)).bit_length() - 1


@dataclass(frozen=True)
class _Runs:
    """The runs of one core's share of the tokens."""

    unit: Unit
    units_per_page: int
    cores: int
    unit_of: Ref  # SMEM Int32[packed + 1]: page · units_per_page + the unit within it; NO_UNIT; last END
    offset: Ref  # SMEM Int32[packed]
    new: Ref  # HBM [packed, …]
    donated: Ref  # the array as it was; the same memory as `array`
    array: Ref  # HBM
    ring: Ref  # VMEM [buffers, *unit.shape]
    tokens: Ref  # VMEM [buffers, unit.tokens, …]
    runs: Ref  # SMEM Int32[2, buffers]
    arrived: Ref
    written: Ref

    @property
    def buffers(self) -> int:
        return self.ring.shape[0]

    def share(self, core: Scalar) -> Scalar:
        """Where a core's tokens begin: at a boundary of runs, for a unit is one core's."""
        return lax.while_loop(
            lambda token: (token > 0) & (self.unit_of[token] == self.unit_of[jnp.maximum(token - 1, 0)]),
            lambda token: token + 1,
            lax.div(core * (self.unit_of.shape[0] - 1), self.cores),
        )

    def next_valid(self, token: Scalar, end: Scalar) -> Scalar:
        """The first token at or after this one whose page is in range, or `end`."""
        return lax.while_loop(
            lambda token: (token < end) & (self.unit_of[token] == NO_UNIT),
            lambda token: token + 1,
            token,
        )

    def send(self, first: Scalar, number: Scalar) -> Scalar:
        """Sends for run `number`, whose first token this is, and returns where it ends."""
        buffer = _low(number, self.buffers)

        @pl.when(number >= self.buffers)
        def wait_for_the_buffer():
            self.wait_written(buffer)

        end = self._end_of_run(first)
        self.runs[FIRST, buffer] = first
        self.runs[TOKENS, buffer] = end - first

        @pl.when(self._is_read(buffer))
        def read():
            self._read(buffer).start()

        self._each_token(buffer, lambda index: self._token(first, buffer, index).start())
        return end

    def change(self, number: Scalar) -> None:
        """Waits for run `number`, merges its tokens into its unit and starts to write it."""
        buffer = _low(number, self.buffers)
        first = self.runs[FIRST, buffer]
        self._wait_arrived(buffer)

        def merge(index):
            slot = _low(self.offset[first + index], self.unit.tokens)
            self.unit.merge(self.ring.at[buffer], self.tokens.at[buffer, index], slot)

        self._each_token(buffer, merge)
        self._write(buffer).start()

    def wait_written(self, buffer: Scalar) -> None:
        self._write(buffer).wait()

    def _wait_arrived(self, buffer: Scalar) -> None:
        @pl.when(self._is_read(buffer))
        def wait():
            self._read(buffer).wait()

        self._each_token(buffer, lambda index: self._token(0, buffer, index).wait())

    def _is_read(self, buffer: Scalar) -> Scalar:
        return (self.runs[TOKENS, buffer] < self.unit.tokens) | (not self.unit.filled)

    def _each_token(self, buffer: Scalar, step: Callable[[Scalar], None]) -> None:
        lax.fori_loop(0, self.runs[TOKENS, buffer], lambda index, _: step(index), None)

    def _end_of_run(self, first: Scalar) -> Scalar:
        """The first token after this one that is not in its unit, or for which there is no room in its buffer."""
        unit, most = self.unit_of[first], first + self.unit.tokens
        return lax.while_loop(
            lambda token: (self.unit_of[token] == unit) & (token < most), lambda token: token + 1, first + 1
        )

    def _place(self, buffer: Scalar) -> Ref:
        unit = self.unit_of[self.runs[FIRST, buffer]]
        page = lax.shift_right_logical(unit, self.units_per_page.bit_length() - 1)
        slot = _low(unit, self.units_per_page) * self.unit.tokens
        return self.unit.place(self.array, page, pl.multiple_of(slot, self.unit.tokens))

    def _read(self, buffer: Scalar) -> Any:
        return pltpu.make_async_copy(self._place(buffer), self.ring.at[buffer], self.arrived.at[buffer])

    def _write(self, buffer: Scalar) -> Any:
        return pltpu.make_async_copy(self.ring.at[buffer], self._place(buffer), self.written.at[buffer])

    def _token(self, first: Scalar, buffer: Scalar, index: Scalar) -> Any:
        return pltpu.make_async_copy(self.new.at[first + index], self.tokens.at[buffer, index], self.arrived.at[buffer])


def _kernel(runs: _Runs) -> None:
    """Runs are sent for half a ring ahead of the one that is changed; the other half is being written."""
    core = pl.program_id(0)
    end = runs.share(core + 1)

    def send_next(state):
        token, sent = state

        def send():
            return runs.next_valid(runs.send(token, sent), end), sent + 1

        return lax.cond(token < end, send, lambda: (token, sent))

    def step(state):
        *ahead, done = state
        ahead = send_next(ahead)
        runs.change(done)
        return *ahead, done + 1

    begin = runs.next_valid(runs.share(core), end)
    ahead = lax.fori_loop(0, runs.buffers // 2, lambda _, state: send_next(state), (begin, jnp.int32(0)))
    *_, done = lax.while_loop(lambda state: state[2] < state[1], step, (*ahead, jnp.int32(0)))

    def wait(number, _):
        runs.wait_written(_low(number, runs.buffers))

    lax.fori_loop(jnp.maximum(done - runs.buffers, 0), done, wait, None)


def _low(number: Scalar, power_of_two: int) -> Scalar:
    """number mod a power of two: one instruction, where a remainder of signed numbers takes many."""
    return number & (power_of_two - 1)


def _bytes(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    size = jnp.dtype(dtype).itemsize
    for dim in shape:
        size *= dim
    return size
