"""Submodules that only serve TransformerBridge: they can be imported, and refuse every name asked of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from engine.errors import Refused


class LeftOut(Refused, ImportError):
    """A name of the original that is not served here; the message says why."""


def refuse_names(module: str, reason: str) -> Callable[[str], NoReturn]:
    """A module `__getattr__` that refuses every name, except the dunders Python itself asks for."""

    def __getattr__(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise LeftOut(f"{module}.{name}: {reason}")

    return __getattr__
