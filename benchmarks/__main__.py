"""`python -m benchmarks`: time and memory of the same work under each library, alternating in one run.

Medians and ratios are printed, and everything that was measured is kept as JSON. Timings on a shared machine drift, so only
ratios of figures from one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

OUT = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often each contender runs each workload (default 7)")
    parser.add_argument("--contenders", default="hf,compat,tlens", help="which to run, by name (default all)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default 2)")
    parser.add_argument("--only", default="", help="comma-separated workloads; all by default")
    parser.add_argument("--out", type=Path, default=OUT / "smollm2.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # measures one load in a process of its own
    options = parser.parse_args()
    path = _checkpoint()
    if options.child:
        print(json.dumps(_load_once(options.child, path)))
        return
    names = options.contenders.split(",")
    measured = {"load": _loads(names, rounds=3)} if not options.only or "load" in options.only.split(",") else {}
    measured |= _workloads(names, path, options)
    _report(measured, options)


def _checkpoint() -> str:
    from demo.real_models import SMOLLM2, ensure, real_home

    os.environ["HF_HOME"] = str(real_home())  # before anything imports the hub's library, which reads it once
    return str(ensure(SMOLLM2))


def _loads(names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Load time of model and tokenizer, time to the first logits and the process's peak memory, each in a fresh process."""
    seen: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "first_logits": [], "peak_mib": []} for name in names}
    for _ in range(rounds):
        for name in names:
            command = [sys.executable, "-m", "benchmarks", "--child", name]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
            for key, value in json.loads(lines[-1]).items():
                seen[name][key].append(value)
    return seen


def _load_once(name: str, path: str) -> dict[str, float]:
    import resource

    import torch
    import transformers  # noqa: F401  imported before the clock starts, for every contender alike
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from benchmarks.contenders import CONTENDERS

    if name == "compat":
        import compat.tlens  # noqa: F401
    elif name == "tlens":
        import transformer_lens  # noqa: F401
    start = time.perf_counter()
    contender = CONTENDERS[name](path)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        contender.forward(torch.arange(64)[None])
    first = time.perf_counter() - start
    return {"seconds": seconds, "first_logits": first, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def _workloads(names: list[str], path: str, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    import torch
    from tqdm import tqdm

    from benchmarks.contenders import CONTENDERS

    torch.set_num_threads(options.threads)
    contenders = {name: CONTENDERS[name](path) for name in names}
    tokens = torch.randint(100, 40_000, (1, 128), generator=torch.Generator().manual_seed(0))
    prompts = torch.randint(100, 40_000, (8, 32), generator=torch.Generator().manual_seed(1))
    vector = torch.zeros(576)
    n_layers = 30
    # name: (work, whether it needs gradients)
    work: dict[str, tuple[Callable[[Any], Any], bool]] = {
        "forward": (lambda c: c.forward(tokens), False),
        "one resid_post": (lambda c: c.capture(tokens, range(15, 16)), False),
        "30 x resid_post": (lambda c: c.capture(tokens, range(n_layers)), False),
        "every name cached": (lambda c: c.cache_all(tokens), False),
        "forward with 100 idle hooks": (lambda c: c.forward_with_idle_hooks(tokens), False),
        "generate 1 x 32 with one hook": (lambda c: c.generate(prompts[:1], 15, vector, 32), False),
        "generate 8 x 32 with one hook": (lambda c: c.generate(prompts, 15, vector, 32), False),
        "attribution (forward, backward)": (lambda c: c.attribute(tokens), True),
    }
    if options.only:
        work = {name: value for name, value in work.items() if name in options.only.split(",")}
    seen: dict[str, dict[str, list[float]]] = {}
    for title, (run, grad) in work.items():
        able = {name: c for name, c in contenders.items() if _can(c, title)}
        seen[title] = {name: [] for name in able}
        with torch.set_grad_enabled(grad):
            for round_ in tqdm(range(options.rounds + 1), desc=title):
                for name, contender in able.items():
                    with _idle_hooks(contender) if "idle" in title else _nothing():
                        start = time.perf_counter()
                        run(contender)
                        if round_:  # the first round warms up
                            seen[title][name].append(time.perf_counter() - start)
    return {title: {name: {"seconds": times} for name, times in by.items()} for title, by in seen.items()}


def _can(contender: Any, title: str) -> bool:
    needs = {"every name cached": "cache_all", "forward with 100 idle hooks": "forward_with_idle_hooks"}.get(title)
    return needs is None or hasattr(contender, needs)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _idle_hooks(_nothing):
    """A hundred hooks at points that a switch of the config keeps from firing."""

    def __init__(self, contender: Any) -> None:
        self.points = [block.attn.hook_result for block in contender.model.blocks] * 4

    def __enter__(self) -> None:
        for point in self.points[:100]:
            point.add_hook(lambda value, hook: None)

    def __exit__(self, *_: object) -> None:
        for point in self.points:
            point.remove_hooks()


def _report(measured: dict[str, Any], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    names = options.contenders.split(",")
    table = Table("workload", *names, *(f"compat / {name}" for name in names if name != "compat"))
    for title, by in measured.items():
        for key in next(iter(by.values())):
            median = {name: statistics.median(values[key]) for name, values in by.items()}
            unit = (lambda v: f"{v:,.0f} MiB") if key == "peak_mib" else (lambda v: f"{v * 1e3:,.0f} ms")
            cells = [unit(median[name]) if name in median else "" for name in names]
            ours = median.get("compat")
            ratios = [f"{ours / median[n]:.2f}" if ours and n in median else "" for n in names if n != "compat"]
            table.add_row(f"{title}, peak memory" if key == "peak_mib" else title, *cells, *ratios)
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "threads": options.threads, "command": " ".join(sys.argv[1:])}
    options.out.write_text(json.dumps({"about": about, "measured": measured}, indent=1) + "\n")
    print(f"kept in {options.out}")


if __name__ == "__main__":
    main()
