"""Attention written out, so that q, k, scores, pattern and z are values that a tap can read and replace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fire = Callable[[str, Tensor], Tensor]


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    fire: Fire,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scaling) v, with a tap at each step.

    q `[b, H, q, dh]`, k and v `[b, K, k, dh]` (K divides H). mask: None means causal, boolean means attend where True,
    float is added. sinks `[H]`: logits of a column that the softmax sees and the pattern drops, so that its rows sum to
    less than one. Returns z `[b, q, H, dh]` and the pattern `[b, H, q, k]`.
    """
    q = fire("q_rot", q.transpose(1, 2)).transpose(1, 2)
    k = fire("k_rot", k.transpose(1, 2)).transpose(1, 2)
    scores = (q @ _per_query_head(k, q).transpose(-1, -2)).mul_(scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = fire("attn_scores", masked(scores, mask))
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    if sinks is not None:
        column = sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        pattern = torch.softmax(torch.cat([scores, column], -1), -1, dtype=wide)[..., :-1].to(q.dtype)
    else:
        pattern = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    # a row with nothing to attend to is NaN until here
    pattern = fire("attn_probs", pattern.nan_to_num() if pattern.requires_grad else pattern.nan_to_num_())
    z = pattern.to(v.dtype) @ _per_query_head(v, q)
    return z.transpose(1, 2), pattern


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores `[b, H, q, k]` with -inf where nothing may be attended to; in place."""
    if mask is None:
        mask = causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
    elif mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        return (scores + mask).masked_fill_(hidden, -torch.inf)
    return scores.masked_fill_(~mask, -torch.inf)


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """`[q, k]`, True where a query may attend; the last query sees every key."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)


def _per_query_head(kv: Tensor, q: Tensor) -> Tensor:
    """Keys or values `[b, K, k, dh]` repeated so that every query head has its own."""
    repeats = q.shape[1] // kv.shape[1]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=1)
