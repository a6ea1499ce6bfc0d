"""The house stands as it was drawn: imports run one way, the engine knows no foreign word, and the seam stays small."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import seam
from engine.eager.engine import EagerEngine
from engine.eager.run import BEFORE_LAYERS
from engine.eager.weights import EagerWeights
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap, Taps
from tests.fake_engine import FakeEngine

ROOT = Path(__file__).parents[1]
# package -> what of ours it may import
MAY_IMPORT = {
    "engine": {"engine"},
    "mappers": {"mappers", "engine"},
    "compat": {"compat", "mappers", "engine"},
    "validator": {"validator", "compat", "mappers", "engine"},
}
OURS = {*MAY_IMPORT, "tests", "demo", "benchmarks"}
FOREIGN = (r"\bhook_[a-z]", r"\bblocks\.[\w{]", "envoy", "transformer_?lens", "nnsight", "nnterp")
REAL_LIBRARIES = {"transformer_lens", "nnsight", "nnterp"}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions included."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield node.lineno, ".".join(part for part in (above, node.module) if part)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files(package)
        for line, module in imports(path)
        if (top := module.partition(".")[0]) in OURS and top not in MAY_IMPORT[package]
    ]
    assert files(package) and wrong == []


def test_the_walk_sees_imports_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    inside = "def f():\n    from engine.points import Address\n    from ..b import c\n"
    source = "import compat.tlens as a\nfrom mappers import tlens\n" + inside
    (tmp_path / "engine" / "deep").mkdir(parents=True)
    (tmp_path / "engine" / "deep" / "x.py").write_text(source)
    seen = {module for _, module in imports(tmp_path / "engine" / "deep" / "x.py")}
    assert seen == {"compat.tlens", "mappers", "engine.points", "engine.b"}


@pytest.mark.parametrize("package", ["engine", "mappers", "compat"])
def test_no_real_library_is_imported_by_what_stands_in_for_it(package: str) -> None:
    wrong = [
        f"{path}:{line}"
        for path in files(package)
        for line, module in imports(path)
        if module.partition(".")[0] in REAL_LIBRARIES
    ]
    assert wrong == []


def test_the_engine_knows_no_foreign_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in files("engine")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for word in FOREIGN
        if re.search(word, line.lower())
    ]
    assert found == []


def test_the_seam_and_its_fake_stay_small() -> None:
    assert lines_with_something_on_them("engine/seam.py") < 110
    assert lines_with_something_on_them("tests/fake_engine.py") < 50


def lines_with_something_on_them(path: str) -> int:
    return sum(bool(line.strip()) for line in (ROOT / path).read_text().splitlines())


@pytest.mark.parametrize("engine", [FakeEngine, EagerEngine])
def test_an_engine_takes_what_the_seam_promises(engine: type) -> None:
    promised = {name: f for name, f in vars(seam.Engine).items() if inspect.isfunction(f) and not name.startswith("_")}
    assert promised.keys() == {"run", "generate", "new_cache", "refuses", "close"}
    for name, method in promised.items():
        due, got = (list(inspect.signature(f).parameters.values()) for f in (method, getattr(engine, name)))
        more = [p for p in got if p.name not in {q.name for q in due}]
        assert [(p.name, p.kind, p.default) for p in due] == [
            (p.name, p.kind, p.default) for p in got if p not in more
        ], name
        assert all(p.default is not inspect.Parameter.empty for p in more), (
            name
        )  # an engine may offer more, never ask for it


def test_the_weights_take_what_the_seam_promises() -> None:
    for name in ("__call__", "has", "prepare_writing", "write"):
        due, got = (inspect.signature(getattr(owner, name)) for owner in (seam.Weights, EagerWeights))
        assert due == got, name


def test_the_fake_fires_taps_in_forward_order_and_its_edits_count() -> None:
    engine, order = FakeEngine(), []
    every = [Address(p.name, layer) for p in POINTS.values() for layer in (range(2) if p.layered else (None,))]
    batch = Batch(torch.tensor([[1, 2, 3]]))
    plain = engine.run(batch, [Tap(a, lambda x, a=a: order.append(str(a)), reads=True) for a in every])
    assert plain.shape == (1, 3, 12) and sorted(order) == sorted(map(str, every))
    assert order[: len(BEFORE_LAYERS) + 1] == [*BEFORE_LAYERS, "resid_pre.0"] and order[-1] == "logits"
    assert order.index("resid_post.0") < order.index("resid_pre.1")
    edited = engine.run(batch, [Tap(Address("z", 1), lambda x: x + 2)])
    assert torch.allclose(edited, plain + 2, atol=1e-5)
    assert engine.run(batch, (), stop=1).shape == (1, 3, 6) and engine.run(batch, (), unembed=False) is None
    assert engine.refuses(Address("z", 2), "read") and engine.refuses(Address("z", 1), "read") is None


def test_the_fake_takes_taps_that_are_added_on_the_way_and_generates() -> None:
    engine, taps, seen = FakeEngine(), Taps(), []
    taps.add(Tap(Address("q", 0), lambda x: taps.add(Tap(Address("k", 0), seen.append))))
    engine.run(Batch(torch.tensor([[1, 2, 3]])), taps)
    assert len(seen) == 1 and seen[0].shape == (1, 3, 2, 4)
    left = iter(range(3))

    def sample(logits: Tensor) -> Tensor | None:
        return logits.argmax(-1) if next(left) < 2 else None

    assert len(list(engine.generate(Batch(torch.tensor([[1]])), lambda step: (), sample))) == 2
