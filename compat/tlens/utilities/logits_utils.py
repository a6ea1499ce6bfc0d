"""Logits to tokens: sampling, and a table to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributions.categorical import Categorical

from compat.tlens.errors import require
from compat.tlens.utilities.library_utils import import_optional

if TYPE_CHECKING:
    import pandas as pd


def logits_to_df(logits: torch.Tensor, tokenizer: Any | None = None, top_k: int | None = None) -> pd.DataFrame:
    """A DataFrame over one position's logits `[d_vocab]`, most probable first, cut to `top_k` rows.

    Columns: token_index, token_string (with a tokenizer), logit, log_prob, probability. Needs pandas.
    """
    pd = import_optional("pandas", "logits_to_df")
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    probs = log_probs.exp()
    order = torch.argsort(probs, descending=True)[:top_k]
    indices = order.tolist()
    columns: dict[str, list[Any]] = {"token_index": indices}
    if tokenizer is not None:
        columns["token_string"] = [tokenizer.decode([index]) for index in indices]
    for name, values in (("logit", logits), ("log_prob", log_probs), ("probability", probs)):
        columns[name] = values[order].tolist()
    return pd.DataFrame(columns)


def sample_logits(
    final_logits: torch.Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id a row, `[batch]`, from logits `[batch, d_vocab]`; torch's generator is drawn from once.

    In this order: the repetition penalty (positive logits of seen tokens divided, negative ones multiplied), the
    temperature (0 takes the arg-max), the frequency penalty (times the token's count), then `top_k`, or else `top_p`
    (the fewest tokens whose mass reaches it). `tokens` `[batch, pos]` are those seen so far; the frequency penalty
    requires them. AssertionError for a `top_k` or `top_p` out of range.
    """
    if repetition_penalty != 1.0 and tokens is not None:
        final_logits = _penalise_seen(final_logits, tokens, repetition_penalty)
    if temperature == 0.0:
        return final_logits.argmax(dim=-1)
    final_logits = final_logits / temperature
    if freq_penalty > 0:
        final_logits = _penalise_counts(final_logits, tokens, freq_penalty)
    if top_k is not None:
        require(top_k > 0, f"top_k must be greater than 0, got {top_k}")
        final_logits = _keep_top_k(final_logits, top_k)
    elif top_p is not None:
        require(1.0 >= top_p > 0.0, f"top_p must lie in (0, 1], got {top_p}")
        final_logits = _keep_top_p(final_logits, top_p)
    return Categorical(logits=final_logits.to(torch.float32)).sample()


def _penalise_seen(logits: torch.Tensor, tokens: torch.Tensor, penalty: float) -> torch.Tensor:
    scores = logits.gather(-1, tokens)
    return logits.scatter(-1, tokens, torch.where(scores > 0, scores / penalty, scores * penalty))


def _penalise_counts(logits: torch.Tensor, tokens: torch.Tensor | None, penalty: float) -> torch.Tensor:
    require(tokens is not None, "a frequency penalty needs the tokens seen so far")
    require(tokens.ndim == 2, f"a frequency penalty needs token ids [batch, pos], got shape {tuple(tokens.shape)}")
    counts = torch.stack([torch.bincount(row, minlength=logits.shape[-1]) for row in tokens])
    return (logits - penalty * counts).to(logits.dtype)


def _keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    weakest = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < weakest, -torch.inf)


def _keep_top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    descending, order = torch.sort(logits, descending=True)
    reached = descending.softmax(dim=-1).cumsum(dim=-1) > p
    drop = reached.roll(1, dims=-1)  # the token that reaches p still counts
    drop[..., 0] = False
    return logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
