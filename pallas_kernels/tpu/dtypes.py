"""What the TPU compiler does not take, said at once."""

from typing import Any

import jax.numpy as jnp


def check_dtype(pool: Any) -> None:
    """NotImplementedError for float16: the compiler refuses it as an argument of a kernel, on every chip."""
    if pool.dtype == jnp.float16:
        raise NotImplementedError(f"{pool.dtype=}; TPU kernels take no float16: make the pool bfloat16 or float32")
