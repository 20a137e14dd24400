"""The scales that new keys and values are divided by where a cache is quantised."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from kvjax.spec import GroupSpec
from pallas_kernels.arguments import QUANTISED_DTYPES, Scales


def scales_by_name(
    group: GroupSpec, tensors: Mapping[str, Shaped[Array, "packed _ _"]], scales: Scales | None
) -> dict[str, Float32[Array, "*_"]]:
    """The scale of each tensor that is to be quantised on its way into the cache: those of "k" and "v", or none.

    Raises:
      ValueError: the group has no k and v, they are stored as they are, they come quantised already, or a scale is
        neither one number nor one a head.
      NotImplementedError: scales a token, for which a cache has no array.
    """
    if scales is None:
        return {}
    specs = {tensor.name: tensor for tensor in group.tensors}
    named = {"k": scales.key, "v": scales.value}
    if not named.keys() <= specs.keys():
        raise ValueError(f"group {group.name!r} caches {sorted(specs)}; scales are of k and v: leave them out")
    found = {}
    for name, scale in named.items():
        spec, scale, tensor = specs[name], jnp.asarray(scale, jnp.float32), tensors[name]
        if spec.dtype not in QUANTISED_DTYPES:
            raise ValueError(f"{name} is cached in {spec.dtype}, which has no scales; leave them out")
        if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype == spec.dtype:
            raise ValueError(f"{name} comes in {tensor.dtype}; with scales pass bfloat16, float16 or float32")
        if scale.ndim == 2:
            raise NotImplementedError(
                f"the scale of {name} has {scale.shape=}: write keeps no scales a token; pass one number or one a "
                "head, or append by pallas_kernels and keep its scales beside the cache"
            )
        if scale.shape not in ((), (spec.heads,)):
            raise ValueError(
                f"the scale of {name} has {scale.shape=}; pass one number, or one for each of the {spec.heads} heads"
            )
        found[name] = scale
    return found
