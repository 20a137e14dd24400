"""What appending costs beside attention: bytes moved by both in a decode step, by arithmetic.

    python -m experiments.append_share [--kv_heads 8] [--key_dim 128] [--value_dim 128]

A decode step appends one token a row and reads the row's whole context, in every layer alike; so the share depends on
the context alone, not on layers or rows.  On TPU a strip of tokens is read and written for the sake of one; new tokens
pass through memory as 32-bit words.  On GPU they are cast by XLA and then copied into their slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from absl import app, flags

from pallas_kernels.tpu.append import LANES, STRIP

KV_HEADS = flags.DEFINE_integer("kv_heads", 8, "KV heads.", lower_bound=1)
KEY_DIM = flags.DEFINE_integer("key_dim", 128, "Width of a key.", lower_bound=1)
VALUE_DIM = flags.DEFINE_integer("value_dim", 128, "Width of a value.", lower_bound=1)

CONTEXTS = (256, 1024, 4096, 16_384, 65_536)
NEW_BYTES = 2  # of an element of new keys and values, as a model computes them: bfloat16
WORD_BYTES = 4


def append_bytes(platform: str, kv_heads: int, lanes: int, itemsize: int) -> int:
    """Bytes read and written to append one decode token, scales aside.

    Args:
      platform: "tpu" or "gpu".
      kv_heads, lanes, itemsize: of the pool; lanes as padded there.
    """
    elements = kv_heads * lanes
    if platform == "tpu":
        return elements * (NEW_BYTES + 2 * WORD_BYTES + 2 * STRIP * itemsize)
    return elements * (NEW_BYTES + 3 * itemsize)


def share(platform: str, context: int, kv_heads: int, lanes: int, itemsize: int) -> float:
    """Bytes of the append over those that attention reads of a context."""
    return append_bytes(platform, kv_heads, lanes, itemsize) / (context * kv_heads * lanes * itemsize)


def main(_: Sequence[str]) -> None:
    used = KEY_DIM.value + VALUE_DIM.value
    print("append bytes / attention bytes" + "".join(f"{context:>10,}" for context in CONTEXTS))
    for platform, lanes in (("tpu", -(-used // LANES) * LANES), ("gpu", used)):
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            itemsize = jnp.dtype(dtype).itemsize
            moved = append_bytes(platform, KV_HEADS.value, lanes, itemsize)
            shares = [share(platform, context, KV_HEADS.value, lanes, itemsize) for context in CONTEXTS]
            print(f"{platform} {dtype:14s} {moved / 1024:7.1f} KiB" + "".join(f"{one:>10.3%}" for one in shares))


if __name__ == "__main__":
    app.run(main)
