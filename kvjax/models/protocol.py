"""What the engine asks of a model.  Any JAX model can follow it; nothing here knows Flax or a model family."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Float32, Int32, PyTree

from kvjax.grant import Grant
from kvjax.spec import CacheSpec


@runtime_checkable
class Model(Protocol):
    """A causal language model over a kvjax cache.

    `forward` and `logits` are pure and traceable.  They take the weights as an argument and never close over them, so
    that a jitted step holds no second copy; pass `model.parameters`, or the same tree cast or sharded.

    Attributes:
      spec: what the model caches; `kvjax.init(model.spec, …)` makes a cache for it.
      parameters: the weights, a pytree of arrays.
      vocabulary: number of token ids.
      max_context: positions the model was trained for; longer contexts are the caller's risk.
    """

    @property
    def spec(self) -> CacheSpec: ...

    @property
    def parameters(self) -> PyTree[Array]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    def forward(
        self, parameters: PyTree[Array], cache: Any, grant: Grant, tokens: Int32[Array, " packed"]
    ) -> tuple[Float[Array, "packed width"], Any]:
        """Runs the granted tokens through all layers: writes and attends each, does not commit.

        `tokens` stand in the order of `grant.row` and `grant.position`.  Padding tokens may be any id in range; their
        hidden states are finite and mean nothing.

        Returns:
          the hidden state of every packed token, and the cache with the tokens' keys and values written.
        """
        ...

    def logits(self, parameters: PyTree[Array], hidden: Float[Array, "n width"]) -> Float32[Array, "n vocabulary"]:
        """Next-token logits of hidden states that `forward` returned, in float32."""
        ...
