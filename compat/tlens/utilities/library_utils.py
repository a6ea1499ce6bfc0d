"""Optional packages: is one there, and its import with an error that says what to install."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from engine.errors import CompatError


class MissingPackage(CompatError, ImportError):
    """An optional package that is not installed; the message holds the install line."""


def is_library_available(name: str) -> bool:
    """Whether `name` can be imported, without importing it."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def import_optional(name: str, needed_by: str) -> Any:
    """The module `name`; `MissingPackage` (an ImportError) with the install line when it is not installed."""
    if not is_library_available(name):
        raise MissingPackage(f"{needed_by} needs {name}, which is not installed: pip install {name}", name=name)
    return importlib.import_module(name)
