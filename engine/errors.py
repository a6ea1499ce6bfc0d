"""Every error of ours hangs under one base, and is also the built-in that old code already catches.

    CompatError
    ├── UnknownName        (KeyError)             a hook, point or model name that nothing answers to
    ├── Refused            (NotImplementedError)  something we will not do rather than do wrongly
    ├── BadReplacement     (ValueError)           a hook returned the wrong shape, dtype or kind
    ├── BadInput           (ValueError)           token ids, masks or lengths the model cannot take
    └── LoadFailed         (OSError, ValueError)  a checkpoint that is missing, damaged or not resolvable
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CompatError(Exception):
    """Base of every error raised by interp-compat itself."""


class UnknownName(CompatError, KeyError):
    """A name nothing answers to. The message lists the nearest names that exist."""

    def __init__(self, name: str, known: Iterable[str], what: str = "name", hint: str = "") -> None:
        self.name, self.hint = name, hint
        self.nearest = get_close_matches(str(name), list(known), n=4, cutoff=0.4)
        message = f"unknown {what} {name!r}"
        if self.nearest:
            message += "; the nearest are " + ", ".join(map(repr, self.nearest))
        if hint:
            message += f". {hint}"
        super().__init__(message)

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return self.args[0]


class Refused(CompatError, NotImplementedError):
    """Something that cannot be done truthfully here; the message says why and what to do instead."""


class BadReplacement(CompatError, ValueError):
    """What a hook returned cannot stand in for what it was given."""


class BadInput(CompatError, ValueError):
    """Input that the model cannot take: token ids out of range, a prompt beyond the context, a bad mask."""


class LoadFailed(CompatError, OSError, ValueError):
    """A checkpoint that could not be found, read or resolved."""
