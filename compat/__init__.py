"""Programs written for other interpretability libraries, run unchanged on one engine.

`python -m compat script.py` runs a program with the old import names answered here; `compat.install()` does the same
inside a notebook.
"""

from __future__ import annotations

from compat.imports import install

__all__ = ["install"]
