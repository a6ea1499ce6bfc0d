"""A local cache in the layout of the Hugging Face hub, so that models in it load offline by their official names."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

REVISION = "0" * 39 + "1"


def cache_root() -> Path:
    """Where built models are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interp-compat"


def home_for(kind: str, recipe: bytes, packages: Iterable[str]) -> Path:
    """A folder to use as HF_HOME; its name changes with the recipe and the packages that its content comes from."""
    digest = hashlib.sha256(recipe)
    for package in packages:
        digest.update(f"{package} {version(package)}".encode())
    return cache_root() / f"{kind}-{digest.hexdigest()[:16]}"


def entry(hub: Path, name: str) -> Path:
    """The cache's folder for one model."""
    return hub / ("models--" + name.replace("/", "--"))


def snapshot(hub: Path, name: str) -> Path:
    """The folder that holds the model's files."""
    return entry(hub, name) / "snapshots" / REVISION


def make_entry(hub: Path, name: str) -> Path:
    """Lay out the cache's folder for a new model; returns `snapshot`, empty, for its files."""
    (entry(hub, name) / "refs").mkdir(parents=True)
    (entry(hub, name) / "refs" / "main").write_text(REVISION)
    snapshot(hub, name).mkdir(parents=True)
    return snapshot(hub, name)


def publish(built: Path, target: Path) -> None:
    """Move a finished folder into place in one step; where another process was faster, its folder stands."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        built.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(built)
