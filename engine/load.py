"""Loads a checkpoint on the engine that `backend=` or the environment variable COMPAT_BACKEND names."""

from __future__ import annotations

import os
from typing import Any

from engine.eager.load import load_eager
from engine.errors import Refused
from engine.seam import Engine

BACKENDS = {"eager": load_eager}


def load_engine(name: str, *, backend: str | None = None, **options: Any) -> Engine:
    """An engine on a hub id, a local folder or a loaded module; options are those of the backend's loader.

    Raises `Refused` for a backend that does not exist here, `LoadFailed` for a checkpoint that cannot be read.
    """
    backend = backend or os.environ.get("COMPAT_BACKEND") or "eager"
    if backend not in BACKENDS:
        raise Refused(f"there is no backend {backend!r} here; these exist: {', '.join(BACKENDS)}")
    return BACKENDS[backend](name, **options)
