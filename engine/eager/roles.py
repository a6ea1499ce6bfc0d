"""Where a Hugging Face decoder keeps its parts: names looked for, role by role, and the layouts of fused projections.

A new family costs rows here. What the rows find is proved on the checkpoint itself when it is loaded (selfcheck.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, cat, stack

TRUNK_ROLES: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "h", "blocks", "block"),
    "final_norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm", "layer_norm", "final_norm"),
    "pos_embed": ("wpe", "embed_positions"),
    "embed_norm": ("word_embeddings_layernorm",),
}

LAYER_ROLES: dict[str, tuple[str, ...]] = {
    "attn": ("self_attn", "attn", "attention", "self_attention"),
    "mixer": ("linear_attn", "conv", "mixer", "mamba", "temporal_block"),  # stands where attention would
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn", "mlp_block"),
}

ATTN_ROLES: dict[str, tuple[str, ...]] = {
    "qkv": ("c_attn", "query_key_value", "qkv_proj", "Wqkv"),
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj", "c_proj", "dense", "out_proj"),
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}

LATENT = ("kv_b_proj",)  # multi-head latent attention: keys and values come from a shared latent, by this projection

MLP_ROLES: dict[str, tuple[str, ...]] = {
    "gate_up": ("gate_up_proj",),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "c_fc", "dense_h_to_4h", "fc1", "fc_in", "w3"),
    "down": ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "w2"),
    "act": ("act_fn", "act", "activation_fn", "activation", "gelu_impl"),
    "router": ("gate", "router"),
}

# A layer's norms; the first row whose names are exactly the norms that the layer has is its layout. One norm that serves
# attention and MLP means that both read the same stream, in parallel.
NORM_LAYOUTS: tuple[dict[str, str], ...] = (
    {"attn_norm": "ln_1", "mlp_norm": "ln_2"},
    {"attn_norm": "ln_1", "mlp_norm": "ln_1"},
    {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"},
    {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    {"attn_norm": "input_layernorm", "mlp_norm": "input_layernorm"},
    {"attn_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    {"attn_norm": "norm_1", "mlp_norm": "norm_2"},
    {"attn_norm": "temporal_pre_norm", "mlp_norm": "channel_pre_norm"},
    {"attn_norm": "norm"},
    {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    },
)
PARALLEL_NORMS = ({"ln_attn", "ln_mlp"},)  # two norms, yet both on the block's input


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


def _split_by_group(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    grouped = fused.unflatten(-1, (heads.n_kv, heads.n // heads.n_kv + 2, heads.d))
    return grouped[..., :-2, :].flatten(-3, -2), grouped[..., -2, :], grouped[..., -1, :]


def _join_by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.unflatten(-2, (k.shape[-2], -1))
    return cat([grouped, k[..., None, :], v[..., None, :]], -2).flatten(-3)


# The fused module's name tells its layout: all q, then all k, then all v; or key/value head by key/value head, each with
# the query heads that share it before it.
QKV_LAYOUTS: dict[str, Layout] = {
    "c_attn": Layout(_split_blocks, _join_blocks),
    "qkv_proj": Layout(_split_blocks, _join_blocks),
    "Wqkv": Layout(_split_blocks, _join_blocks),
    "query_key_value": Layout(_split_by_group, _join_by_group),
}


def _split_codegen(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    q, v, k = (part.flatten(-2).unflatten(-1, (-1, heads.d)) for part in fused.unflatten(-1, (4, 3, -1)).unbind(-2))
    return q, k, v


def _join_codegen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return stack([part.flatten(-2).unflatten(-1, (4, -1)) for part in (q, v, k)], -2).flatten(-3)


# Families whose fused projection has a layout of its own under a customary name; CodeGen's is cut for four devices.
LAYOUTS_BY_CLASS: dict[str, Layout] = {"CodeGenAttention": Layout(_split_codegen, _join_codegen)}
