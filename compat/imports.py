"""Old import names answered by the facades.

`install()` puts a finder in front of Python's own, so that `import transformer_lens.hook_points` gives the very module
object `compat.tlens.hook_points`, whether or not the real library is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from engine.errors import Refused


@dataclass(frozen=True)
class Library:
    """A library whose import names are answered, and where. Submodules keep their names unless `renamed` moves them."""

    name: str
    facade: str
    renamed: Mapping[str, str] = field(default_factory=dict)


TL_COMPONENTS = (
    *("abstract_attention", "attention", "embed", "grouped_query_attention", "layer_norm", "layer_norm_pre"),
    *("pos_embed", "rms_norm", "rms_norm_pre", "transformer_block", "unembed"),
    *("mlps", "mlps.can_be_used_as_mlp", "mlps.gated_mlp", "mlps.mlp", "mlps.moe"),
)
LIBRARIES: tuple[Library, ...] = (
    Library(
        "transformer_lens",
        "compat.tlens",
        {
            "loading": "loading_from_pretrained",
            "config": "HookedTransformerConfig",
            "config.hooked_transformer_config": "HookedTransformerConfig",
            "cache": "past_key_value_caching",
            "cache.key_value_cache": "past_key_value_caching",
            "cache.key_value_cache_entry": "past_key_value_caching",
            **{f"components.{name}": "components" for name in TL_COMPONENTS},
        },
    ),
)


def install(libraries: Sequence[Library] = LIBRARIES) -> None:
    """Answer the libraries' import names with our facades, here and in processes that multiprocessing spawns.

    Raises Refused where one of the real libraries has been imported already: its classes would then mix with ours.
    """
    for library in libraries:
        loaded = sys.modules.get(library.name)
        if loaded is not None and loaded is not sys.modules.get(library.facade):
            raise Refused(
                f"{library.name} itself has been imported already, from {getattr(loaded, '__file__', 'elsewhere')}; "
                "call compat.install() before the first import of it (restart the kernel in a notebook)"
            )
    if not any(isinstance(finder, AnsweringFinder) and finder.libraries == libraries for finder in sys.meta_path):
        sys.meta_path.insert(0, AnsweringFinder(libraries))
        _install_in_spawned_processes()


class AnsweringFinder(MetaPathFinder):
    """Finds `<library>[.<submodule>]` as the facade's module."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        self.libraries = libraries

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        for library in self.libraries:
            ours = answer(library, fullname)
            if ours is None:
                continue
            if not _exists(ours):
                raise ModuleNotFoundError(f"{fullname} is not served by {library.facade}", name=fullname)
            # every answer may have submodules: ours holds some of the library's packages in one file
            return ModuleSpec(fullname, SameModuleLoader(ours), is_package=True)
        return None


def answer(library: Library, fullname: str) -> str | None:
    """The name of our module that answers an import, or None where the import is none of the library's.

    Renamed submodules are answered under the facade's name too: `from transformer_lens import config` asks there.
    """
    root = next((root for root in (library.name, library.facade) if f"{fullname}.".startswith(f"{root}.")), None)
    submodule = fullname[len(root) + 1 :] if root else ""
    if root is None or (root == library.facade and submodule not in library.renamed):
        return None
    return ".".join(filter(None, (library.facade, library.renamed.get(submodule, submodule))))


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent that is missing, or is no package
        return False


class SameModuleLoader(Loader):
    """Loads a module under a second name: the same object, which keeps its own name and spec."""

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.ours)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec
        if type(module) is ModuleType:
            module.__class__ = _KeepsItsNames


class _KeepsItsNames(ModuleType):
    """A package whose class of the same name as a submodule (`HookedTransformer`) survives the submodule's import."""

    def __setattr__(self, name: str, value: object) -> None:
        taken = name in self.__dict__ and not isinstance(self.__dict__[name], ModuleType)
        if not (taken and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def _install_in_spawned_processes() -> None:
    """Send an `_Installer` along with what multiprocessing tells a new process before that one runs the main module."""
    from multiprocessing import spawn

    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return original(name) | {"compat": _Installer()}

    spawn.get_preparation_data = get_preparation_data


class _Installer:
    """Unpickling one calls `install()`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, ()
