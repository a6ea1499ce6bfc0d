"""Loss and accuracy of next-token prediction."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compat.tlens.errors import require


def lm_cross_entropy_loss(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    per_token: bool = False,
) -> torch.Tensor:
    """Cross entropy, in nats, of predicting each next token from logits `[batch, pos, d_vocab]`.

    Gives the mean, or `[batch, pos - 1]` with `per_token`. With a mask `[batch, pos]` a pair counts only if both its
    tokens are attended: other entries are 0 and are left out of the mean. AssertionError for a mask of another shape.
    """
    log_probs = F.log_softmax(logits, dim=-1)[..., :-1, :]
    gained = log_probs.gather(dim=-1, index=tokens[..., 1:, None])[..., 0]
    n_pairs: int | float = gained.numel()
    if attention_mask is not None:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(tokens.shape)}"
        require(attention_mask.shape == tokens.shape, f"attention_mask and tokens differ in shape: {shapes}")
        counted = torch.logical_and(attention_mask[:, :-1], attention_mask[:, 1:])
        gained = gained.masked_fill(~counted, 0.0)
        n_pairs = counted.sum().item()
    return -gained if per_token else -gained.sum() / n_pairs


def lm_accuracy(logits: torch.Tensor, tokens: torch.Tensor, per_token: bool = False) -> torch.Tensor:
    """Share of next tokens that the top logit names, or the booleans `[batch, pos - 1]` with `per_token`."""
    hits = logits.argmax(dim=-1)[:, :-1] == tokens[:, 1:]
    return hits if per_token else hits.sum() / hits.numel()
