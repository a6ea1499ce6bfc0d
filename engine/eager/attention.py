"""The one attention function that Hugging Face models call once they are ours.

Without taps inside a layer's attention it is the checkpoint's own implementation, untouched; with taps it is the
explicit path of `engine.attention`. Registered with transformers' attention interface and, under the same name, with its
mask interface: a name known to only one of the two would silently get no mask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention import causal_mask, explicit_attention
from engine.eager.places import INSIDE
from engine.eager.run import current_run
from engine.errors import Refused

NAME = "interp_compat"
# Arguments that transformers' sdpa swallows without applying them; the family's own function knows what they mean.
_NOT_FOR_SDPA = ("softcap", "s_aux", "position_bias")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention signature: query `[b, H, q, dh]`, key and value `[b, K, k, dh]` -> (z `[b, q, H, dh]`, pattern)."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    run = current_run()
    state = run.attention_state(module) if run is not None else None
    if state is not None and any(run.tapped(point, state) for point in INSIDE):
        if kwargs.get("position_bias") is not None:
            raise Refused(f"the attention of layer {state.index} takes a position bias, which the explicit path has no formula for")
        keys_are_shared = run.writes("k_rot", state)  # with the cache, which an edit in place must not enter
        return explicit_attention(
            query,
            key.clone() if keys_are_shared else key,
            value,
            mask=attention_mask,
            scaling=scaling,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            fire=lambda point, tensor: run.fire(point, state, tensor),
        )
    return _own(module, kwargs)(
        module, query, key, value, _mask_for(module, query, key, attention_mask, kwargs), scaling=scaling, dropout=dropout, **kwargs
    )


def take_over(model: nn.Module) -> bool:
    """Makes `model` call `attention`, remembering on its modules what they called before.

    False for a family with attention code of its own, which stays as it is (inside.py).
    """
    config = model.config
    if config._attn_implementation == NAME:
        return True
    if not model._can_set_attn_implementation():
        return False
    own = config._attn_implementation or "eager"
    own = own if own in ("eager", "sdpa") else "sdpa"  # flash and flex kernels take masks of a form that ours is not
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    for module in model.modules():
        if isinstance(getattr(module, "config", None), type(config)):
            module._own_attention = own
    return True


def _own(module: nn.Module, kwargs: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    name = getattr(module, "_own_attention", "eager")
    if name == "eager" or any(kwargs.get(argument) is not None for argument in _NOT_FOR_SDPA):
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _mask_for(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """The mask in the form that the own implementation takes: eager functions add a float and know no None."""
    if _own(module, kwargs) in ALL_ATTENTION_FUNCTIONS.values() or (mask is not None and mask.dtype != torch.bool):
        return mask
    if mask is None:
        if query.shape[2] == 1:
            return None
        mask = causal_mask(query.shape[2], key.shape[2], query.device)
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, torch.finfo(query.dtype).min)
