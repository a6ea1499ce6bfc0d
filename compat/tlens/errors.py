"""Errors of the facade where TransformerLens raises a plain built-in: ours is that built-in as well.

BadArgument    (BadInput, AssertionError)  an argument that TransformerLens asserts on
TokenOutOfRange (BadInput, IndexError)     an id that the embedding table has no row for
UnknownModel   (UnknownName, ValueError)   a model name that is no alias, no hub id and no folder
"""

from __future__ import annotations

from typing import Any

from engine.errors import BadInput, UnknownName


class BadArgument(BadInput, AssertionError):
    """An argument with a value that means nothing here."""


class TokenOutOfRange(BadInput, IndexError):
    """A token id outside the vocabulary."""


class UnknownModel(UnknownName, ValueError):
    """A model name that nothing answers to. The message lists the nearest names."""


def require(condition: Any, message: str) -> None:
    """Raise `BadArgument` unless the condition holds; unlike `assert` it also holds under `python -O`."""
    if not condition:
        raise BadArgument(message)
