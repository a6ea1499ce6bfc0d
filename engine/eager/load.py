"""Loads a checkpoint as an eager engine, and turns what can go wrong into one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.eager.engine import EagerEngine
from engine.errors import LoadFailed


def load_eager(
    name: str,
    *,
    hf_model: Any = None,
    tokenizer: Any = None,
    tokenizer_options: Callable[[str], dict[str, Any]] = lambda architecture: {},
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    **from_pretrained: Any,
) -> EagerEngine:
    """An engine on a hub id, a local folder, or an already loaded `hf_model`. Raises `LoadFailed`.

    tokenizer: one to use instead of the checkpoint's. tokenizer_options: from the architecture, keywords for the latter.
    """
    model = hf_model
    if model is None:
        model = _read(name, AutoModelForCausalLM, dtype=dtype, **from_pretrained)
        if device is not None and "device_map" not in from_pretrained:
            model = model.to(device)
    engine = EagerEngine(model, tokenizer, model_id=name, owned=hf_model is None)
    if tokenizer is None:
        shared = {k: v for k, v in from_pretrained.items() if k in _SHARED}
        engine.tokenizer = load_tokenizer(name, tokenizer_options(engine.facts.architecture), **shared)
    return engine


_SHARED = ("revision", "cache_dir", "token", "trust_remote_code", "local_files_only", "subfolder")


def load_tokenizer(name: str, wanted: dict[str, Any], **options: Any) -> Any:
    """The checkpoint's tokenizer, as `wanted` if it can be, or None for a folder that has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **wanted, **options)
    except (OSError, ValueError):
        return load_tokenizer(name, {}, **options) if wanted else None
    return tokenizer if tokenizer.vocab_size else None  # where the files are missing, an empty one is made up


def _read(name: str, auto: Any, **options: Any) -> Any:
    try:
        model, found = auto.from_pretrained(name, output_loading_info=True, **options)
    except Exception as error:
        raise LoadFailed(
            f"could not load {name!r}: {_cause(error)}. It may be a local folder with config.json and weights, or a hub id; "
            "without a network, point at a folder, or set HF_HOME to a cache that holds the model and HF_HUB_OFFLINE=1"
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:  # they were filled with random numbers, which a log alone would tell
        raise LoadFailed(f"{name!r} lacks {len(missing)} weights of a {type(model).__name__}, the first {missing[0]}")
    return model


def _cause(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}".rstrip(".")
