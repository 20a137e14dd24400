"""The named layouts once more, as numpy index expressions: the oracle.

Written from the engines' documented shapes and not from `kvjax.layout`: plain tensors `[layer, page, token, head,
lane]` in, the arrays of a layout out.  Padding is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (numpy then knows bfloat16 by name)
import numpy as np

from kvjax.spec import GroupSpec, TensorSpec


@dataclass(frozen=True)
class Geometry:
    """Sizes of a pool of K and V."""

    layers: int = 2
    num_pages: int = 5
    page_size: int = 4
    heads: int = 3
    key_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"

    @property
    def group(self) -> GroupSpec:
        k = TensorSpec("k", self.heads, self.key_dim, self.dtype)
        v = TensorSpec("v", self.heads, self.value_dim, self.dtype)
        return GroupSpec("attention", tuple(range(self.layers)), (k, v))

    def tensors(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random bits for every element, all different from zero."""
        draw = np.random.default_rng(seed)
        size = np.dtype(self.dtype).itemsize
        found = {}
        for name, width in (("k", self.key_dim), ("v", self.value_dim)):
            shape = (self.layers, self.num_pages, self.page_size, self.heads, width)
            found[name] = draw.integers(1, 120, (*shape, size), dtype=np.uint8).view(self.dtype)[..., 0]
        return found


def foreign_arrays(name: str, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of layout `name`."""
    layers, pages, tokens, heads, width = k.shape
    every = slice(None)
    if name == "kvjax":
        kv = np.zeros((layers * pages, heads, tokens, width + v.shape[-1]), k.dtype)
        for layer in range(layers):
            for page in range(pages):
                for head in range(heads):
                    kv[layer * pages + page, head, :, :width] = k[layer, page, :, head]
                    kv[layer * pages + page, head, :, width:] = v[layer, page, :, head]
        return {"kv": kv}
    if name == "vllm_nhd":
        kv = np.zeros((layers, 2, pages, tokens, heads, width), k.dtype)
        kv[:, 0], kv[:, 1] = k, v
        return {"kv": kv}
    if name == "vllm_hnd":
        kv = np.zeros((layers, 2, pages, heads, tokens, width), k.dtype)
        for head in range(heads):
            kv[:, 0, :, head], kv[:, 1, :, head] = k[..., head, :], v[..., head, :]
        return {"kv": kv}
    if name == "flashinfer_nhd":
        kv = np.zeros((layers, pages, 2, tokens, heads, width), k.dtype)
        kv[:, :, 0], kv[:, :, 1] = k, v
        return {"kv": kv}
    if name == "flashinfer_hnd":
        kv = np.zeros((layers, pages, 2, heads, tokens, width), k.dtype)
        for token in range(tokens):
            kv[:, :, 0, :, token], kv[:, :, 1, :, token] = k[:, :, token], v[:, :, token]
        return {"kv": kv}
    if name == "vllm_packed":
        x = 16 // k.dtype.itemsize
        key_cache = np.zeros((layers, pages, heads, width // x, tokens, x), k.dtype)
        value_cache = np.zeros((layers, pages, heads, v.shape[-1], tokens), k.dtype)
        for lane in range(width):
            key_cache[..., lane // x, :, lane % x] = k[..., lane].swapaxes(-1, -2)
        for lane in range(v.shape[-1]):
            value_cache[..., lane, :] = v[..., lane].swapaxes(-1, -2)
        return {"k": key_cache, "v": value_cache}
    if name == "tpu_inference":
        packing = 4 // k.dtype.itemsize
        if width == 64:
            padded = -(-heads // packing) * packing
            kv = np.zeros((layers, pages, tokens, padded, 128), k.dtype)
            kv[..., :heads, :64], kv[..., :heads, 64:] = k, v
        else:
            padded = -(-2 * heads // packing) * packing
            kv = np.zeros((layers, pages, tokens, padded, -(-width // 128) * 128), k.dtype)
            kv[..., 0 : 2 * heads : 2, :width], kv[..., 1 : 2 * heads : 2, :width] = k, v
        return {"kv": kv.reshape(layers, pages, tokens, padded // packing, packing, kv.shape[-1])}
    if name == "jax_paged_attention":
        out = {}
        for tensor, values in (("k", k), ("v", v)):
            out[tensor] = np.zeros((layers, heads, pages, tokens, values.shape[-1]), k.dtype)
            for head in range(heads):
                out[tensor][:, head] = values[every, every, every, head]
        return out
    if name == "token_major":
        return {n: values.reshape(layers, pages * tokens, heads, -1) for n, values in (("k", k), ("v", v))}
    raise KeyError(name)
