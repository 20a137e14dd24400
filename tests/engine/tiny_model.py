"""A model in sixty lines of plain jax: any JAX model can follow the protocol, and the engine's tests stay fast.

Two layers of grouped-query attention and an MLP over random weights, with learned positions.  `reference_tokens` is the
same mathematics without any cache, in float64 numpy: every token attends to all before it, computed from scratch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY, CONTEXT = 2, 4, 2, 8, 32, 61, 160
SCALE, SEED = 2.5, 2  # Weights under which greedy tokens vary and the two best logits stand well apart.


class TinyModel:
    """Follows `kvjax.models.protocol.Model`."""

    spec = kvjax.CacheSpec.uniform(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32")
    vocabulary = VOCABULARY

    def __init__(self, max_context: int = CONTEXT):
        self.max_context = max_context
        draw = np.random.default_rng(SEED)
        shapes = {
            "embedding": (VOCABULARY, WIDTH),
            "positions": (max_context, WIDTH),
            "q": (LAYERS, WIDTH, HEADS * DIM),
            "k": (LAYERS, WIDTH, KV_HEADS * DIM),
            "v": (LAYERS, WIDTH, KV_HEADS * DIM),
            "o": (LAYERS, HEADS * DIM, WIDTH),
            "up": (LAYERS, WIDTH, 2 * WIDTH),
            "down": (LAYERS, 2 * WIDTH, WIDTH),
        }
        scales = {name: SCALE * shape[1] ** -0.5 if shape[0] == LAYERS else 1.0 for name, shape in shapes.items()}
        self.parameters = {
            name: jnp.asarray(draw.normal(scale=scales[name], size=shape), jnp.float32)
            for name, shape in shapes.items()
        }

    def forward(self, parameters, cache, grant, tokens):
        x = parameters["embedding"][tokens] + parameters["positions"][grant.position]

        def layer(carry, inputs):
            x, cache = carry
            index, weights = inputs
            h = normalise(x)
            q = (h @ weights["q"]).reshape(-1, HEADS, DIM)
            k = (h @ weights["k"]).reshape(-1, KV_HEADS, DIM)
            v = (h @ weights["v"]).reshape(-1, KV_HEADS, DIM)
            cache = kvjax.write(cache, index, grant, k=k, v=v)
            x = x + kvjax.attend(cache, index, grant, q).reshape(-1, HEADS * DIM) @ weights["o"]
            return (x + jnp.maximum(normalise(x) @ weights["up"], 0) @ weights["down"], cache), None

        stacked = {name: parameters[name] for name in ("q", "k", "v", "o", "up", "down")}
        (x, cache), _ = jax.lax.scan(layer, (x, cache), (jnp.arange(LAYERS), stacked))
        return normalise(x), cache

    def logits(self, parameters, hidden):
        return hidden @ parameters["embedding"].T


def normalise(x):
    return x / ((x * x).mean(-1, keepdims=True) + 1e-6) ** 0.5


def reference_logits(model: TinyModel, tokens) -> np.ndarray:
    """Logits after the last of `tokens`, in float64, without a cache."""
    weights = {name: np.asarray(value, np.float64) for name, value in model.parameters.items()}
    x = weights["embedding"][list(tokens)] + weights["positions"][: len(tokens)]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(LAYERS):
        h = normalise(x)
        q = (h @ weights["q"][layer]).reshape(-1, HEADS, DIM)
        k, v = (
            (h @ weights[name][layer]).reshape(-1, KV_HEADS, DIM).repeat(HEADS // KV_HEADS, axis=1) for name in "kv"
        )
        scores = np.where(causal, np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(tokens), -1) @ weights["o"][layer]
        x = x + np.maximum(normalise(x) @ weights["up"][layer], 0) @ weights["down"][layer]
    return normalise(x[-1]) @ weights["embedding"].T


def reference_tokens(model: TinyModel, prompt, number: int) -> tuple[list[int], list[float]]:
    """`number` greedy tokens and their top-two margins."""
    tokens, margins = list(prompt), []
    for _ in range(number):
        logits = reference_logits(model, tokens)
        second, first = np.sort(logits)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(float(first - second))
    return tokens[len(prompt) :], margins
