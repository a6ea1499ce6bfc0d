"""`python -m compat script.py [args]`, `-m module [args]` or `-c code`: see `compat.run`."""

from __future__ import annotations

from compat.run import main

if __name__ == "__main__":
    main()
