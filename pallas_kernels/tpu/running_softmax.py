"""The arithmetic on one block of keys and values: a running softmax over blocks.

Milakov and Gimelshein 2018 (arXiv:1805.02867), as used by Dao et al. 2022 (arXiv:2205.14135).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32

LANES = 128
# Logits of slots that a query does not see: finite, for −inf − (−inf) would be NaN, and so far below the least
# reference that their weight is exactly zero, whether the query has seen anything yet or not.
UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)
LEAST_REFERENCE = UNSEEN / 2

Ref = Any  # a Pallas reference


@dataclass(frozen=True)
class RunningSoftmax:
    """What the blocks of a tile have come to so far, for every query line of every KV head. All in vector memory."""

    reference: Ref  # Float32[kv_heads, lines, LANES]: the largest logit so far, the same in all lanes
    total: Ref  # Float32[kv_heads, lines, LANES]: weights relative to it; their sum over lanes counts
    weighted: Ref  # Float32[kv_heads, lines, value_lanes]: the sum of values so weighted

    @staticmethod
    def scratch(kv_heads: int, lines: int, value_lanes: int) -> list[Any]:
        return [pltpu.VMEM((kv_heads, lines, lanes), jnp.float32) for lanes in (LANES, LANES, value_lanes)]

    def open(self, sinks: Float32[Array, "kv_heads lines 1"] | None, counted: Any) -> None:
        """Forgets everything; sinks take their share of the weights, if `counted`, a traced bool."""
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)
        if sinks is None:
            self.reference[...] = jnp.full(self.reference.shape, LEAST_REFERENCE, jnp.float32)
            self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        else:
            sink = jnp.where(counted, jnp.broadcast_to(sinks, self.reference.shape), UNSEEN)
            reference = jnp.maximum(sink, LEAST_REFERENCE)
            self.reference[...] = reference
            self.total[...] = jnp.exp(sink - reference) / LANES

    def take(
        self,
        head: int,
        logits: Float32[Array, "lines tokens"],
        values: Float[Array, "tokens value_lanes"],
        value_scale: Float32[Array, "1 tokens"] | None,
        visible: Bool[Array, "lines tokens"] | None,
    ) -> None:
        """Takes a block into account for one KV head; without `visible` every line sees every slot of it."""
        if visible is not None:
            logits = jnp.where(visible, logits, UNSEEN)
        before = self.reference[head]
        reference = jnp.maximum(before, logits.max(axis=1, keepdims=True))
        weights = jnp.exp(logits - _repeat(reference, logits.shape[1]))
        decay = jnp.exp(before - reference)
        self.reference[head] = reference
        columns = [weights[:, start : start + LANES] for start in range(0, weights.shape[1], LANES)]
        self.total[head] = decay * self.total[head] + sum(columns)
        if value_scale is not None:
            weights = weights * value_scale
            if visible is not None:
                weights = jnp.where(visible, weights, 0)  # where nothing is seen, scales may be NaN
        product = matmul(weights.astype(values.dtype), values)
        self.weighted[head] = _repeat(decay, product.shape[1]) * self.weighted[head] + product


def matmul(
    a: Float[Array, "rows inner"], b: Float[Array, "inner columns"], transpose: bool = False
) -> Float32[Array, "rows columns"]:
    """a @ b, or a @ b.T, in float32: exact to it for float32 operands, one pass of the MXU for bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _repeat(x: Float32[Array, "lines lanes"], lanes: int) -> jax.Array:
    """An array that is the same in all lanes, with more of them."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)
