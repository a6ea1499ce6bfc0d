"""Where a Hugging Face decoder keeps its parts: names looked for, role by role, and the layouts of fused projections.

A new family costs rows here. What the rows find is proved on the checkpoint itself when it is loaded (selfcheck.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, cat, stack

TRUNK_ROLES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "h", "blocks", "block"),
    "final_norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f"),
    "pos_embed": ("wpe", "embed_positions"),
}

LAYER_ROLES: dict[str, tuple[str, ...]] = {
    "attn": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward"),
}

ATTN_ROLES: dict[str, tuple[str, ...]] = {
    "qkv": ("c_attn", "query_key_value", "qkv_proj", "Wqkv"),
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj", "c_proj", "dense", "out_proj"),
    "q_norm": ("q_norm", "q_layernorm"),
    "k_norm": ("k_norm", "k_layernorm"),
}

MLP_ROLES: dict[str, tuple[str, ...]] = {
    "gate_up": ("gate_up_proj",),
    "gate": ("gate_proj",),
    "up": ("up_proj", "c_fc", "dense_h_to_4h", "fc1"),
    "down": ("down_proj", "c_proj", "dense_4h_to_h", "fc2"),
    "act": ("act_fn", "act", "activation_fn"),
}

# A layer's norms; the first row whose names are exactly the norms that the layer has is its layout.
NORM_LAYOUTS: tuple[dict[str, str], ...] = (
    {"attn_norm": "ln_1", "mlp_norm": "ln_2"},
    {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)


@dataclass(frozen=True)
class Heads:
    """Sizes that a fused projection is split by."""

    n: int
    n_kv: int
    d: int


@dataclass(frozen=True)
class Layout:
    """How q, k and v lie in the last axis of one fused projection's output, and how they are put back."""

    split: Callable[[Tensor, Heads], tuple[Tensor, Tensor, Tensor]]  # [..., out] -> [..., H|K|K, dh]
    join: Callable[[Tensor, Tensor, Tensor], Tensor]


def _split_blocks(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (heads.n * heads.d, heads.n_kv * heads.d, heads.n_kv * heads.d)
    q, k, v = (part.unflatten(-1, (-1, heads.d)) for part in fused.split(sizes, -1))
    return q, k, v


def _join_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cat([q.flatten(-2), k.flatten(-2), v.flatten(-2)], -1)


def _split_by_head(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = fused.unflatten(-1, (heads.n, 3, heads.d)).unbind(-2)
    return q, k, v


def _join_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return stack([q, k, v], -2).flatten(-3)


# The fused module's name tells its layout: all q then all k then all v, or q, k, v of each head in turn.
QKV_LAYOUTS: dict[str, Layout] = {
    "c_attn": Layout(_split_blocks, _join_blocks),
    "qkv_proj": Layout(_split_blocks, _join_blocks),
    "Wqkv": Layout(_split_blocks, _join_blocks),
    "query_key_value": Layout(_split_by_head, _join_by_head),
}
