"""`python -m compat` shows a program, and its caller, what `python` itself would."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHOWS_WHERE_IT_RUNS = """
import sys
print(__name__, __file__, __spec__ and __spec__.name, __package__, type(__loader__).__name__, __doc__)
print(sorted(globals()))
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""
PROGRAMS = {
    "plain": SHOWS_WHERE_IT_RUNS,
    "docstring and future": '"""Doc."""\nfrom __future__ import annotations\nx: A = 1\nprint(__doc__, __annotations__)',
    "exit code": "import sys; sys.exit(7)",
    "exit message": "raise SystemExit('enough')",
    "exit none": "raise SystemExit",
    "exception": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "chained exception": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e\n",
    "syntax error": "x = (1,\nprint(\n",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "own excepthook": "import sys\nsys.excepthook = lambda kind, e, tb: print('mine', e, tb.tb_lineno)\n1 / 0\n",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('hi')\nraise RuntimeError('x')\n",
    "neighbour": "import neighbour; print(neighbour.__file__)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\nprint('on')",
    "unicode": "# -*- coding: latin-1 -*-\nprint(len('\xe9'))",
}


def python(*arguments: str | Path, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `python arguments`."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("title", PROGRAMS)
def test_script_runs_as_under_python(title: str, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "neighbour.py").write_text("")
    (folder / "program.py").write_bytes(PROGRAMS[title].encode("latin-1"))
    command = ("programs/program.py", "one", "-m", "--two=3")
    assert python("-m", "compat", *command, cwd=tmp_path) == python(*command, cwd=tmp_path)


@pytest.mark.parametrize("title", [title for title in PROGRAMS if title not in ("neighbour",)])
def test_module_runs_as_under_python(title: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('package imported')\n")
    (package / "program.py").write_bytes(PROGRAMS[title].encode("latin-1"))
    command = ("-m", "package.program", "one", "-c", "--two=3")
    assert python("-m", "compat", *command, cwd=tmp_path) == python(*command, cwd=tmp_path)


CODE = ("import sys; print(sys.argv, repr(sys.path[0]), __name__)", "1 / 0", "exit(3)", "x = (")


@pytest.mark.parametrize("code", CODE)
def test_code_runs_as_under_python(code: str, tmp_path: Path) -> None:
    command = ("-c", code, "one", "-m")
    assert python("-m", "compat", *command, cwd=tmp_path) == python(*command, cwd=tmp_path)


@pytest.mark.parametrize("command", [("missing.py",), ("-m", "missing_module"), ("-m", "json.missing")])
def test_missing_program_is_reported_as_python_reports_it(command: tuple[str, ...], tmp_path: Path) -> None:
    assert python("-m", "compat", *command, cwd=tmp_path) == python(*command, cwd=tmp_path)


def test_folder_and_zip_with_a_main_run_as_under_python(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "__main__.py").write_text("import sys; print(__name__, __file__, sys.argv, sys.path[0])")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(folder / "__main__.py", "__main__.py")
    for program in ("app", "app.zip"):
        assert python("-m", "compat", program, "x", cwd=tmp_path) == python(program, "x", cwd=tmp_path)


def test_script_behind_a_link_finds_its_neighbours_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "program.py").write_text(SHOWS_WHERE_IT_RUNS)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "program.py")
    assert python("-m", "compat", "link.py", cwd=tmp_path) == python("link.py", cwd=tmp_path)


def test_safe_path_keeps_the_scripts_folder_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.path)")
    ours = python("-m", "compat", "program.py", cwd=tmp_path, PYTHONSAFEPATH="1")
    assert ours == python("program.py", cwd=tmp_path, PYTHONSAFEPATH="1")


@pytest.mark.parametrize("command", [(), ("-m",), ("-c",)])
def test_incomplete_command_line_shows_the_usage(command: tuple[str, ...], tmp_path: Path) -> None:
    code, out, err = python("-m", "compat", *command, cwd=tmp_path)
    assert (code, out) == (2, "") and "python -m compat script.py" in err


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_old_names_are_answered_in_processes_that_multiprocessing_starts(method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import multiprocessing, sys\n"
        "def finders():\n"
        "    return sum(type(finder).__name__ == 'AnsweringFinder' for finder in sys.meta_path)\n"
        "at_import = finders()\n"
        "def work(x):\n"
        "    return x, at_import, __name__\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
        "        print(pool.map(work, [5]))\n"
    )
    assert python("-m", "compat", "program.py", cwd=tmp_path) == (0, "[(5, 1, '__mp_main__')]\n", "")
