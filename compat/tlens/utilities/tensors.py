"""Small functions of plain tensors."""

from __future__ import annotations

from typing import Any

import einops
import numpy as np
import torch

from compat.tlens.errors import require


def to_numpy(tensor: Any) -> np.ndarray:
    """A numpy array of a tensor (bfloat16 as float32), a sequence, a scalar or a string; ValueError for other types."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if isinstance(tensor, (list, tuple, int, float, bool, str)):
        return np.array(tensor)
    raise ValueError(f"no numpy array can be made of a {type(tensor).__name__}")


def get_corner(tensor: Any, n: int = 3) -> Any:
    """The first `n` entries along every axis."""
    return tensor[(slice(n),) * tensor.ndim]


def remove_batch_dim(tensor: torch.Tensor) -> torch.Tensor:
    """`[1, ...]` without its first axis; a longer first axis stays."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor


def transpose(tensor: torch.Tensor) -> torch.Tensor:
    """The last two axes swapped."""
    return tensor.transpose(-1, -2)


def is_square(x: torch.Tensor) -> bool:
    """Whether `x` is a matrix with as many rows as columns."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: torch.Tensor) -> bool:
    """Whether `x` is square with only zeros above its diagonal."""
    return is_square(x) and x.equal(x.tril())


def check_structure(t1: torch.Tensor, t2: torch.Tensor, *, verbose: bool = False) -> None:
    """Print whether two matrices rise and fall alike from each row to the next, and from each column to the next.

    Prints PASSED, or the first kind that differs with its indices. AssertionError for other than two equal shapes.
    """
    require(t1.ndim == 2 and t1.shape == t2.shape, f"two matrices of one shape, not {t1.shape} and {t2.shape}")
    mismatches = {
        "row": _steps_that_differ("row", t1, t2, verbose),
        "column": _steps_that_differ("column", t1.T, t2.T, verbose),
    }
    for what, indices in mismatches.items():
        if indices:
            print(f"{what} mismatch: {indices}")
            return
    print("PASSED")


def _steps_that_differ(what: str, t1: torch.Tensor, t2: torch.Tensor, verbose: bool) -> list[int]:
    falls = [t[:-1].ge(t[1:]) for t in (t1, t2)]
    differ = (falls[0] != falls[1]).any(dim=-1).nonzero().flatten().tolist()
    if verbose:
        print(f"Checking {what}s")
        for i in differ:
            print(f"\t{what}s {i}:{i + 1}\n\tt1: {falls[0][i].tolist()}\n\tt2: {falls[1][i].tolist()}")
    return differ


def get_offset_position_ids(past_kv_pos_offset: int, attention_mask: torch.Tensor) -> torch.Tensor:
    """Position ids `[batch, pos]`, counted from the first attended token and cut to those after the cached ones.

    `attention_mask` is `[batch, offset + pos]`; leading pads get 0.
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def get_cumsum_along_dim(tensor: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    """Running sum along `dim`, from its end with `reverse`."""
    if reverse:
        return tensor.flip(dims=(dim,)).cumsum(dim=dim).flip(dims=(dim,))
    return tensor.cumsum(dim=dim)


def repeat_along_head_dimension(tensor: torch.Tensor, n_heads: int, clone_tensor: bool = True) -> torch.Tensor:
    """`[batch, pos, d_model]` to `[batch, pos, n_heads, d_model]`; without the clone all heads share their storage."""
    repeated = einops.repeat(tensor, "batch pos d_model -> batch pos head d_model", head=n_heads)
    return repeated.clone() if clone_tensor else repeated


def filter_dict_by_prefix(dictionary: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The entries under `prefix`, named without it: {"a.b.c": 1} under "a.b" (or "a.b.") is {"c": 1}."""
    start = prefix if prefix.endswith(".") else prefix + "."
    return {key.removeprefix(start): value for key, value in dictionary.items() if key.startswith(start)}
