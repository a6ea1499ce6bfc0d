"""Run a program as `python` itself would, with the old import names answered by the facades.

What the program sees is what `python script.py` shows it: sys.argv, sys.path, `__main__`, `__file__`; and so is what
its caller sees: tracebacks without frames of ours, and exit codes.
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from compat.imports import install

USAGE = """\
usage: python -m compat script.py [args]
       python -m compat -m module [args]
       python -m compat -c code [args]
runs the program with `import transformer_lens` answered by compat.tlens"""
USAGE_ERROR = 2  # python's own exit code for a command line or a file that it cannot make sense of
ROOT = Path(__file__).parents[1]
OWN_FILES = (__file__, str(Path(__file__).with_name("__main__.py")))


def main() -> None:
    """The command line `python -m compat ...`, read from sys.argv."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else USAGE_ERROR)
    flag = arguments[0] if arguments[0] in ("-m", "-c") else None
    if flag and len(arguments) < 2:
        print(f"Argument expected for the {flag} option\n{USAGE}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    install()
    try:
        if flag == "-m":
            run_module(arguments[1], arguments[2:])
        elif flag == "-c":
            run_code(arguments[1], arguments[2:])
        else:
            run_script(arguments[0], arguments[1:])
    except BaseException:
        _show_without_own_frames()
        raise


def run_script(script: str, arguments: list[str]) -> None:
    """As `python script arguments`; the script may also be a folder or zip file that holds a `__main__.py`."""
    sys.argv[:] = [script, *arguments]
    if pkgutil.get_importer(script) is not None:
        _set_first_path(os.path.abspath(script))
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    module = _fresh_main(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """As `python -m name arguments`."""
    sys.argv[:] = ["-m", *arguments]
    _fresh_main()
    runpy._run_module_as_main(name)


def run_code(code: str, arguments: list[str]) -> None:
    """As `python -c code arguments`."""
    sys.argv[:] = ["-c", *arguments]
    _set_first_path("")
    exec(compile(code, "<string>", "exec", dont_inherit=True), _fresh_main().__dict__)


def _fresh_main(**names: object) -> ModuleType:
    """A new `__main__` in the place of ours, with what Python puts into one."""
    module = ModuleType("__main__")
    module.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}} | names)
    sys.modules["__main__"] = module
    return module


def _set_first_path(folder: str) -> None:
    """Put the program's folder where Python put ours, unless it was told not to put any."""
    if sys.flags.safe_path:
        return
    replaced, sys.path[0] = sys.path[0], folder
    if Path(replaced) == ROOT and str(ROOT) not in sys.path:  # run from a source tree that may not be installed
        sys.path.append(str(ROOT))


def _show_without_own_frames() -> None:
    """Let whatever hook the program left at the end show its traceback as if we had not been there."""
    shown_by = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        error.__traceback__ = _after_own_frames(traceback)
        shown_by(kind, error, error.__traceback__)

    sys.excepthook = excepthook


def _after_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below our own frames, which come first (after those of `python -m`)."""
    entry, below = traceback, traceback
    reached = False
    while entry is not None:
        ours = entry.tb_frame.f_code.co_filename in OWN_FILES
        if reached and not ours:
            break
        reached = reached or ours
        if ours:
            below = entry.tb_next
        entry = entry.tb_next
    return below
