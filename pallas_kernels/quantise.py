"""What is stored of new keys and values: rounded to the pool's dtype, by a scale where it is a quantised one."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped, UInt


def quantise(
    tokens: Float[Array, "packed kv_heads dim"], scale: Float32[Array, "*shape"], dtype: jnp.dtype
) -> Shaped[Array, "packed kv_heads dim"]:
    """tokens / scale in a quantised dtype: rounded to nearest even, saturating, NaN kept where there is one.

    `scale` is one number, or one a head `[kv_heads]`, or one a token and head `[packed, kv_heads]`. Where it is 0, so
    is the result.
    """
    scale = jnp.broadcast_to(scale, tokens.shape[:2])[..., None]
    exact = jnp.where(scale > 0, tokens.astype(jnp.float32) / jnp.where(scale > 0, scale, 1), 0)
    limits = jnp.iinfo(dtype) if dtype == jnp.int8 else jnp.finfo(dtype)
    exact = jnp.clip(exact, float(limits.min), float(limits.max))
    return (jnp.round(exact) if dtype == jnp.int8 else exact).astype(dtype)


def token_scales(tokens: Float[Array, "packed kv_heads dim"], dtype: jnp.dtype) -> Float32[Array, "packed kv_heads"]:
    """The scale at which each token of each head fills the range of a quantised dtype; 0 for a token of zeros."""
    largest = jnp.iinfo(dtype).max if dtype == jnp.int8 else jnp.finfo(dtype).max
    # Times the inverse, which compilers make of a division by a constant in any case: now all agree on the last bit.
    return jnp.abs(tokens.astype(jnp.float32)).max(axis=-1) * jnp.float32(1 / float(largest))


def stored_tokens(
    tensors: tuple[Float[Array, "packed kv_heads _"], ...],
    scales: tuple[Float32[Array, "*_"], ...] | None,
    pool: Shaped[Array, "total_pages kv_heads page_size lanes"],
) -> tuple[Shaped[Array, "packed kv_heads lanes"], tuple[Float32[Array, "packed kv_heads"], ...] | None]:
    """New tokens as a pool's slots hold them, tensors side by side, lanes beyond them zero; and scales made for them.

    The scales are those of each token and head where `scales` has one a token, for each of the tensors; else None.
    """
    made = None
    if scales is not None:
        if scales[0].ndim == 2:
            made = tuple(token_scales(tensor, pool.dtype) for tensor in tensors)
        pairs = zip(tensors, made or scales, strict=True)
        stored = [quantise(tensor, scale, pool.dtype) for tensor, scale in pairs]
    else:
        stored = [tensor.astype(pool.dtype) for tensor in tensors]
    tokens = jnp.concatenate(stored, axis=-1)
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, pool.shape[-1] - tokens.shape[-1]))), made


def as_bits(values: Shaped[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """Each element's bits as an unsigned integer. XLA moves these as they are, but may make all NaNs alike."""
    return lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
