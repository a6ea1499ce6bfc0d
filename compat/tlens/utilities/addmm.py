"""Fused bias and matrix product, in the order of operations of Hugging Face's Conv1D."""

from __future__ import annotations

import torch


def vanilla_addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """input + mat1 @ mat2 for matrices `[m, n]` and `[n, o]`; `input` broadcasts to `[m, o]`."""
    return torch.addmm(input, mat1, mat2)


def batch_addmm(bias: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """bias + x @ weight for x `[..., d_in]` and weight `[d_in, d_out]`; gives `[..., d_out]`."""
    rows = vanilla_addmm(bias, x.view(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[-1])
