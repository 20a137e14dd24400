"""What a model caches, read from what its publisher wrote down: Hugging Face's config.json or a GGUF header.

Plain Python, no arrays.  Sizes are made of it in `kvjax.capacity`; `kvjax.CacheSpec.from_config` takes from it what the
runtime can run.
"""

from kvjax.architecture.description import Architecture, CachedTensor, CacheGroup, StateTensor
from kvjax.architecture.fields import ConfigError, FieldUse, config_integer
from kvjax.architecture.gguf import config_of_gguf
from kvjax.architecture.registry import MODEL_TYPES, read_architecture

__all__ = [
    "MODEL_TYPES",
    "Architecture",
    "CacheGroup",
    "CachedTensor",
    "ConfigError",
    "FieldUse",
    "StateTensor",
    "config_integer",
    "config_of_gguf",
    "read_architecture",
]
