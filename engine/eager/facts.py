"""The facts of a checkpoint, read from its config and from the modules that were resolved."""

from __future__ import annotations

from typing import Any

from engine.eager.resolve import Tree
from engine.seam import Facts

_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "hidden_activation_function")


def read_facts(tree: Tree, config: Any, model_id: str) -> Facts:
    """Facts of a resolved model. `config` is its text config."""
    first, heads = tree.layers[0], tree.heads
    down = first.parts["down"]
    down = getattr(down, "base_layer", down)
    d_mlp = down.weight.shape[0] if type(down).__name__ == "Conv1D" else down.in_features
    rope = getattr(config, "rope_parameters", None) or {}
    rope = next((part for part in rope.values() if isinstance(part, dict)), rope)  # one entry a kind of layer
    rotary = bool(rope)
    return Facts(
        model_id=model_id,
        architecture=(getattr(config, "architectures", None) or [type(tree.model).__name__])[0],
        n_layers=len(tree.layers),
        d_model=config.hidden_size,
        n_heads=heads.n,
        n_kv_heads=heads.n_kv,
        d_head=heads.d,
        d_mlp=d_mlp,
        d_vocab=tree.embed.weight.shape[0],
        n_ctx=config.max_position_embeddings,
        norm=tree.final_norm.kind,
        eps=tree.final_norm.eps,
        act_fn=next((getattr(config, name) for name in _ACTIVATIONS if getattr(config, name, None)), "unknown"),
        gated_mlp="gate" in first.parts or "gate_up" in first.parts,
        parallel=first.parallel,
        positions="learned" if tree.pos_embed is not None else "rotary" if rotary else "none",
        rotary_dim=int(heads.d * rope.get("partial_rotary_factor", 1.0)) if rotary else 0,
        rotary_base=float(rope.get("rope_theta", 10000.0)) if rotary else 0.0,
        rotary_adjacent_pairs=False,
        attn_scale=1 / getattr(first.attn, "scaling", heads.d**-0.5),
        attn_softcap=getattr(config, "attn_logit_softcapping", None),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        sliding_windows=tuple(getattr(layer.attn, "sliding_window", None) for layer in tree.layers),
        qk_norm="q_norm" in first.norms,
        post_norms="attn_post_norm" in first.norms,
        n_experts=None,
        experts_per_token=None,
        dtype=tree.embed.weight.dtype,
        device=tree.embed.weight.device,
    )
