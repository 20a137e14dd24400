"""A cache in a file: `save`, `load`, and `describe` for the contract between them."""

from kvjax.saving.cache_file import load, save
from kvjax.saving.container import CacheFileError
from kvjax.saving.description import describe

__all__ = ["CacheFileError", "describe", "load", "save"]
