"""Old import names are answered by a facade's own module objects."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from compat.imports import LIBRARIES, Library, answer, install
from engine.errors import CompatError

FACADE = {
    "__init__.py": "from .Thing import Thing",
    "Thing.py": "class Thing: pass",
    "points.py": "from . import Thing as class_itself\nfrom .Thing import Thing\nclass Point: pass",
    "parts.py": "class Wheel: pass",
    "tools/__init__.py": "",
    "tools/saw.py": "from ..points import Point",
    "broken.py": "import does_not_exist_anywhere",
}
OLD = Library("old_library", "new_facade", {"hooks": "points", "parts.wheel": "parts", "parts.wheel.spoke": "parts"})


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`old_library` is answered by a small facade, and also lies on the path for real."""
    for name, source in FACADE.items():
        path = tmp_path / OLD.facade / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / OLD.name).mkdir()
    (tmp_path / OLD.name / "__init__.py").write_text("real = True")
    (tmp_path / OLD.name / "extra.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    before = set(sys.modules)
    install((OLD,))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_library_and_facade_are_the_same_modules(answered: None) -> None:
    for submodule in ("", ".Thing", ".points", ".tools", ".tools.saw"):
        assert load(OLD.name + submodule) is load(OLD.facade + submodule)
    assert load("old_library.tools.saw").Point is load("new_facade.points").Point


def test_module_keeps_its_own_name_and_spec(answered: None) -> None:
    module = load("old_library.points")
    assert (module.__name__, module.__spec__.name, module.__package__) == ("new_facade.points",) * 2 + ("new_facade",)
    assert importlib.reload(module) is module


def test_renamed_submodule_is_answered_by_ours(answered: None) -> None:
    assert load("old_library.hooks") is load("new_facade.points")
    assert load("old_library.parts.wheel.spoke").Wheel is load("new_facade.parts").Wheel
    namespace: dict[str, object] = {}
    exec("from old_library import hooks; import old_library.hooks as again", namespace)
    assert namespace["hooks"] is namespace["again"] is load("new_facade.points")


def test_class_named_like_its_submodule_stays_the_class(answered: None) -> None:
    namespace: dict[str, type] = {}
    exec("import old_library.Thing\nfrom old_library.Thing import Thing as inner", namespace)
    exec("from old_library import Thing", namespace)
    assert namespace["Thing"] is namespace["inner"] and isinstance(namespace["Thing"], type)


def test_submodule_that_is_not_served_says_so(answered: None) -> None:
    for name in ("old_library.extra", "old_library.points.deeper", "old_library.tools.hammer"):
        with pytest.raises(ModuleNotFoundError, match=f"{name} is not served by new_facade"):
            load(name)


def test_errors_inside_the_facade_are_not_hidden(answered: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="does_not_exist_anywhere"):
        load("old_library.broken")


def test_names_that_only_begin_alike_are_left_alone() -> None:
    assert answer(OLD, "old_library_extras") is None
    assert answer(OLD, "new_facade") is None
    assert answer(OLD, "other.old_library") is None


def test_install_twice_changes_nothing(answered: None) -> None:
    before = sys.meta_path[:]
    load(OLD.name)
    install((OLD,))
    assert sys.meta_path == before


def test_install_refuses_once_the_real_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "old_library", ModuleType("old_library"))
    with pytest.raises(CompatError, match="old_library itself has been imported already"):
        install((OLD,))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_renamed_submodule_leads_to_one_of_ours_and_hides_none(library: Library) -> None:
    facade = Path(importlib.util.find_spec(library.facade).origin).parent  # type: ignore[union-attr, arg-type]
    for old, ours in library.renamed.items():
        assert any((facade / f"{ours}{end}").exists() for end in (".py", "/__init__.py")), ours
        hidden = facade / old.replace(".", "/")
        assert not hidden.with_suffix(".py").exists() and not hidden.is_dir(), old


def test_import_paths_of_old_programs_lead_to_compat_tlens() -> None:
    submodules = (
        "HookedTransformer HookedTransformerConfig hook_points ActivationCache FactoredMatrix utils utilities patching "
        "loading_from_pretrained components components.attention past_key_value_caching cache.key_value_cache config"
    )
    code = f"""
import compat
compat.install()
import importlib, sys
import transformer_lens
for name in {submodules!r}.split():
    module = importlib.import_module("transformer_lens." + name)
    assert module is sys.modules[module.__name__] and module.__name__.startswith("compat.tlens."), module
from transformer_lens import HookedTransformer, utils, loading, config
import compat.tlens
assert transformer_lens is compat.tlens
assert isinstance(HookedTransformer, type) and isinstance(transformer_lens.HookedTransformerConfig, type)
assert isinstance(transformer_lens.ActivationCache, type) and isinstance(transformer_lens.FactoredMatrix, type)
print("served")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "served\n", done.stderr


def test_importing_compat_imports_no_heavy_library() -> None:
    code = "import compat, sys; compat.install(); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "set()\n", done.stderr
