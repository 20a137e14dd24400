"""Models that use the cache, and loaders for their files."""

from kvjax.models.errors import ModelError
from kvjax.models.loading import LoadedModel, load
from kvjax.models.protocol import Model

__all__ = ["LoadedModel", "Model", "ModelError", "load"]
