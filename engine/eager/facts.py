"""The facts of a checkpoint, read from its config and from the modules that were resolved."""

from __future__ import annotations

from typing import Any

from engine.eager.resolve import Layer, Norm, Tree
from engine.seam import Facts

_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "hidden_activation_function")
_ACTIVATION_CLASSES = {"BloomGelu": "gelu_fast", "GELU": "gelu"}  # where the config does not say
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "seq_length")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WINDOWED = ("sliding_attention", "local")  # kinds of layers that attend to a window
UNLIMITED = 1 << 20  # no position table and no limit in the config
ALIBI = ("bloom", "mpt")  # families whose config does not say so
ADJACENT_PAIRS = ("gptj", "codegen", "cohere", "cohere2", "glm", "glm4", "ernie4_5", "helium")  # rotary over (0, 1), (2, 3), ...


def read_facts(tree: Tree, config: Any, model_id: str) -> Facts:
    """Facts of a resolved model. `config` is its text config."""
    first, heads = tree.layers[0], tree.heads
    attending = next((layer for layer in tree.layers if layer.attends), first)
    dense = next((layer for layer in tree.layers if "down" in layer.parts), first)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = next((part for part in rope.values() if isinstance(part, dict)), rope)  # one entry a kind of layer
    rotary = bool(rope) or getattr(config, "rotary_dim", None) is not None
    alibi = getattr(config, "alibi", False) or config.model_type in ALIBI
    return Facts(
        model_id=model_id,
        architecture=(getattr(config, "architectures", None) or [type(tree.model).__name__])[0],
        n_layers=len(tree.layers),
        d_model=config.hidden_size,
        n_heads=heads.n,
        n_kv_heads=heads.n_kv,
        d_head=heads.d,
        d_mlp=_d_mlp(dense, config),
        d_vocab=tree.embed.weight.shape[0],
        n_ctx=next((getattr(config, name) for name in _CONTEXTS if getattr(config, name, None)), UNLIMITED),
        norm=tree.final_norm.kind,
        eps=tree.final_norm.eps,
        act_fn=_act_fn(dense, config),
        gated_mlp=bool({"gate", "gate_up"} & dense.parts.keys()) or hasattr(dense.mlp, "experts"),
        parallel=first.parallel,
        positions="learned" if tree.pos_embed is not None else "alibi" if alibi else "rotary" if rotary else "none",
        rotary_dim=_rotary_dim(config, rope, heads.d) if rotary else 0,
        rotary_base=float(rope.get("rope_theta", 10000.0)) if rotary else 0.0,
        rotary_adjacent_pairs=config.model_type in ADJACENT_PAIRS,
        attn_scale=_attn_scale(attending.inner, heads.d),
        attn_softcap=getattr(config, "attn_logit_softcapping", None),
        logit_scale=tree.logit_scale,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        sliding_windows=_sliding_windows(config, len(tree.layers)),
        embed_norm=tree.embed_norm is not None,
        qk_norm="q_norm" in attending.norms,
        qk_norm_joint=_is_joint(attending.norms.get("q_norm"), heads.d),
        post_norms="attn_post_norm" in first.norms and "attn_norm" in first.norms,
        pre_norms="attn_norm" in first.norms,
        shared_norm=_is_shared(first),
        sinks=getattr(attending.inner, "sinks", None) is not None,
        n_experts=next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None),
        experts_per_token=getattr(config, "num_experts_per_tok", None),
        dtype=tree.embed.weight.dtype,
        device=tree.embed.weight.device,
    )


def _act_fn(layer: Layer, config: Any) -> str:
    named = next((getattr(config, name) for name in _ACTIVATIONS if getattr(config, name, None)), None)
    return named or _ACTIVATION_CLASSES.get(type(layer.parts.get("act")).__name__, "unknown")


def _d_mlp(layer: Layer, config: Any) -> int:
    """The width of the MLP; of a mixture of experts, of one expert."""
    if "down" not in layer.parts:
        return getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 0)
    down = getattr(layer.parts["down"], "base_layer", layer.parts["down"])
    return down.weight.shape[0] if type(down).__name__ == "Conv1D" else down.in_features


def _sliding_windows(config: Any, n_layers: int) -> tuple[int | None, ...]:
    """How many positions back each layer attends; None for all of them."""
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        everywhere = window is not None and getattr(config, "use_sliding_window", True)
        return (window if everywhere else None,) * n_layers
    return tuple(window if kind in _WINDOWED else None for kind in kinds)


def _is_shared(layer: Layer) -> bool:
    norm, other = layer.norms.get("attn_norm"), layer.norms.get("mlp_norm")
    return norm is not None and other is not None and norm.module is other.module


def _is_joint(norm: Norm | None, d_head: int) -> bool:
    return norm is not None and norm.gain.dim() == 1 and norm.gain.numel() > d_head


def _rotary_dim(config: Any, rope: dict[str, Any], d_head: int) -> int:
    return getattr(config, "rotary_dim", None) or int(d_head * rope.get("partial_rotary_factor", 1.0))


def _attn_scale(attention: Any, d_head: int) -> float:
    """What q.k is divided by. GPT-Neo divides by nothing, and says nothing."""
    for name in ("scaling", "inv_norm_factor", "softmax_scale"):
        if isinstance(getattr(attention, name, None), float):
            return 1 / getattr(attention, name)
    return 1.0 if hasattr(attention, "attention_type") else float(d_head**0.5)
