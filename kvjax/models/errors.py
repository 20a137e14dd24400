"""The error for anything wrong in a model's files."""

from __future__ import annotations

from os import PathLike


class ModelError(ValueError):
    """A model file or directory cannot be used; the message names the file and the field or tensor at fault.

    Attributes:
      path: the file or directory.
    """

    def __init__(self, path: str | PathLike[str], problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
