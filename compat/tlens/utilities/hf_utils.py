"""Files, data sets and settings from the Hugging Face hub."""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from compat.tlens.utilities.library_utils import import_optional
from engine.errors import BadInput

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_WAIT = 120.0  # seconds
_SMALL_DATASETS = {
    "openwebtext": "stas/openwebtext-10k",
    "owt": "stas/openwebtext-10k",
    "pile": "NeelNanda/pile-10k",
    "c4": "NeelNanda/c4-10k",
    "code": "NeelNanda/code-10k",
    "python": "NeelNanda/code-10k",
    "c4_code": "NeelNanda/c4-code-20k",
    "c4-code": "NeelNanda/c4-code-20k",
    "wiki": "NeelNanda/wiki-10k",
}


def __getattr__(name: str) -> str:
    """`CACHE_DIR`, asked of the hub's library when it is wanted."""
    if name == "CACHE_DIR":
        from huggingface_hub.constants import HF_HUB_CACHE

        return HF_HUB_CACHE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_hf_token() -> str | None:
    """HF_TOKEN of the environment, None where it is empty or not set."""
    return os.environ.get("HF_TOKEN") or None


def call_hf_with_retry(
    func: Callable[..., T], *args: Any, max_attempts: int = 3, base_delay: float = 10.0, **kwargs: Any
) -> T:
    """`func(*args, **kwargs)`, tried again when the hub answers 429 (too many requests); other errors pass at once.

    Waits as long as the answer's Retry-After says, else `base_delay` seconds, doubled each time, give or take 20%.
    """
    for attempt in range(max_attempts):
        try:
            return func(*args, **kwargs)
        except Exception as error:
            response = getattr(error, "response", None)
            if getattr(response, "status_code", None) != 429 or attempt == max_attempts - 1:
                raise
            wait = _retry_after(response)
            if wait is None:
                wait = min(base_delay * 2**attempt, _LONGEST_WAIT) * random.uniform(0.8, 1.2)
            logger.warning("the hub answers 429; trying again in %.1f s (%d of %d)", wait, attempt + 1, max_attempts)
            time.sleep(wait)
    raise RuntimeError(f"max_attempts must be at least 1, got {max_attempts}")


def _retry_after(response: Any) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (AttributeError, KeyError, TypeError, ValueError):  # absent, or given as a date
        return None


def enable_hf_retry() -> None:
    """Make transformers' `Auto*.from_pretrained` try again on 429, for the whole process. Calling it twice is once."""
    import transformers

    for name in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor"):
        auto_class = getattr(transformers, name)
        load = auto_class.from_pretrained
        if not getattr(load, "retries_on_429", False):
            auto_class.from_pretrained = classmethod(_retrying(load.__func__))


def _retrying(load: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        return call_hf_with_retry(load, cls, *args, **kwargs)

    from_pretrained.retries_on_429 = True
    return from_pretrained


def get_rotary_pct_from_config(config: Any) -> float:
    """The share of a head that is rotated, from `rotary_pct` or `rope_parameters`; 1.0 where neither says."""
    if hasattr(config, "rotary_pct"):
        return config.rotary_pct
    parameters = getattr(config, "rope_parameters", None)
    return parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0


def select_compatible_kwargs(kwargs_dict: dict[str, Any], callable: Callable[..., Any]) -> dict[str, Any]:
    """The entries of `kwargs_dict` that `callable` has a parameter for, keyword-only ones and wrapped functions too."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {name for name, parameter in inspect.signature(callable).parameters.items() if parameter.kind in named}
    return {name: value for name, value in kwargs_dict.items() if name in accepted}


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """A file of a hub repository: a .pth unpickled onto the CPU, a .json parsed, the path of any other (said aloud).

    `force_is_torch` unpickles whatever the file is called; only do that to files you trust. `cache_dir` None is the
    hub's own cache. Keywords that `hf_hub_download` knows, such as `revision`, are passed on; others are ignored.
    """
    from huggingface_hub import hf_hub_download

    options = select_compatible_kwargs(kwargs, hf_hub_download)
    path = call_hf_with_retry(
        hf_hub_download, repo_id=repo_name, filename=file_name, subfolder=subfolder, cache_dir=cache_dir, **options
    )
    if path.endswith(".pth") or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=False)
    if path.endswith(".json"):
        return json.loads(Path(path).read_text())
    print("File type not supported:", path.split(".")[-1])
    return path


def clear_huggingface_cache() -> None:
    """Delete the hub's whole cache folder, every model and data set in it. What cannot be deleted is left, and said."""
    from huggingface_hub.constants import HF_HUB_CACHE

    print("Deleting Hugging Face cache directory and all its contents.")
    shutil.rmtree(HF_HUB_CACHE, ignore_errors=True)
    if os.path.exists(HF_HUB_CACHE):
        print(f"Warning: {HF_HUB_CACHE} could not be cleared fully")


def keep_single_column(dataset: Dataset | IterableDataset, col_name: str) -> Dataset | IterableDataset:
    """The data set with one column only."""
    for name in dataset.features:
        if name != col_name:
            dataset = dataset.remove_columns(name)
    return dataset


def get_dataset(dataset_name: str, **kwargs: Any) -> Dataset:
    """The train split of a small text data set by nickname, about 10,000 rows with a "text" column.

    Nicknames: openwebtext (owt), pile, c4, code (python), c4_code (c4-code), wiki; ValueError for another. Keywords go
    to `datasets.load_dataset`. Needs the datasets package.
    """
    if dataset_name not in _SMALL_DATASETS:
        raise BadInput(f"no data set is called {dataset_name!r} here; these are: {', '.join(_SMALL_DATASETS)}")
    load_dataset = import_optional("datasets", "get_dataset").load_dataset
    return load_dataset(_SMALL_DATASETS[dataset_name], split="train", **kwargs)
