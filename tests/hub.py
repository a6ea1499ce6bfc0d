"""Tiny random models in a local hub cache, under official names.

`transformer_lens.HookedTransformer.from_pretrained("gpt2")` and `AutoModelForCausalLM.from_pretrained("gpt2")` load
them offline once HF_HOME is `hub_home()`. Every parameter is random (norm gains not 1, biases not 0); the families are
the rows of tests/hub_families.py.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import real_models
from demo.hub_cache import cache_root, entry, home_for, make_entry, publish, snapshot
from tests.hub_families import FAMILIES, FURTHER, HEAD_DIM, Family
from tests.text import TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "FURTHER", "FURTHER_NAMES", "HEAD_DIM", "NAMES", "SEED"]
SEED = 1
NAMES = tuple(family.name for family in FAMILIES)
FURTHER_NAMES = tuple(family.name for family in FURTHER)


def hub_home() -> Path:
    """The HF_HOME whose hub cache holds the tiny models; its name changes with their recipe and the libraries."""
    recipe = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("hub*.py"))) + TEXT.encode()
    return home_for("tiny-hub", recipe, ["torch", "transformers", "tokenizers"])


def ensure_hub() -> Path:
    """Build the tiny hub unless it is there already; returns `hub_home()`."""
    home = hub_home()
    if not home.is_dir():
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root()) as workplace:
            built = Path(workplace) / "home"
            for family in (*FAMILIES, *FURTHER):
                build(family, make_entry(built / "hub", family.name))
            publish(built, home)
    return home


def local_folder(name: str) -> Path:
    """The tiny model's folder, for code that takes local paths."""
    return snapshot(ensure_hub() / "hub", name)


def ensure_real(name: str) -> Path:
    """Bring a real model (see demo.real_models) into this hub, under its official name; returns its folder."""
    folder = real_models.ensure(name)
    link = entry(ensure_hub() / "hub", name)
    if not link.exists():
        link.unlink(missing_ok=True)  # it led to a folder that has been cleared away
        with suppress(FileExistsError):  # another process was faster
            link.symlink_to(folder.parents[1], target_is_directory=True)
    return folder


def build(family: Family, folder: Path) -> None:
    """Write the family's tiny model and tokenizer to a folder."""
    import torch
    import transformers

    tokenizer = family.tokenizer(family.tokenizer_size)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = getattr(transformers, family.config_class)(**family.config, **ids, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, SEED, family.gain, family.sharpness)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.extra_config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.extra_config, indent=2))


def randomise(model: PreTrainedModel, seed: int, gain: float = 1.0, sharpness: float = 1.3) -> None:
    """Give every parameter a value that a mistake would show in.

    Matrices are scaled to enlarge what they act on by `sharpness`, so that attention is far from uniform; norm gains vary
    around `gain`, biases around 0.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                centre = gain if name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.3 * noise)
            elif _is_table(name):
                parameter.copy_(0.12 * noise)
            else:
                parameter.copy_(sharpness * noise / _width_in(model, name, parameter) ** 0.5)


def _is_table(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed_tokens", "embed_in"))


def _width_in(model: PreTrainedModel, name: str, matrix: Any) -> int:
    """The size of the axis a matrix sums over; GPT-2's Conv1D keeps it first."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return matrix.shape[0 if type(owner).__name__ == "Conv1D" else 1]
