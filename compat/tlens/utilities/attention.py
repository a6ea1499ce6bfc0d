"""Projections of the residual stream into heads."""

from __future__ import annotations

import einops
import torch
import torch.nn.functional as F


def simple_attn_linear(input: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One input for all heads: `[batch, pos, d_model]` to `[batch, pos, head, d_head]`.

    `w` is `[head, d_model, d_head]` and `b` is `[head, d_head]`; they are moved to the input's device.
    """
    w, b = w.to(input.device), b.to(input.device)
    rows = einops.rearrange(w, "head d_model d_head -> (head d_head) d_model")
    return F.linear(input, rows, b.reshape(-1)).reshape(*input.shape[:2], *b.shape)


def complex_attn_linear(input: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An input per head: `[batch, pos, head, d_model]` to `[batch, pos, head, d_head]`."""
    equation = "batch pos head d_model, head d_model d_head -> batch pos head d_head"
    return einops.einsum(input, w, equation) + b


def clamp_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v clamped to [-clip, clip], as new tensors: a hooked tensor must not change in place."""
    return q.clamp(-clip, clip), k.clamp(-clip, clip), v.clamp(-clip, clip)
