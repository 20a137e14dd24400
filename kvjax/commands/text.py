"""Text for people."""

from __future__ import annotations


def one_line(message: object) -> str:
    """A message without line breaks."""
    return " ".join(str(message).split())
