"""Why a family, or one layer of it, lacks a point: a table of what each point needs and the sentence where it is missing."""

from __future__ import annotations

from collections.abc import Callable

from engine.eager.resolve import Layer, Tree
from engine.points import Address
from engine.seam import Facts


def _has_mlp(layer: Layer) -> bool:
    return layer.module("mlp_end") is not None


def _projections_missing(layer: Layer) -> str:
    if not layer.attends:
        return f"layer {layer.index} is a {type(layer.attn).__name__}, which has no attention heads"
    return f"the queries, keys and values of {type(layer.attn).__name__} come from a shared latent, not from projections by head"


def _no_linears(layer: Layer) -> str:
    if "router" in layer.parts or hasattr(layer.mlp, "experts"):
        return f"layer {layer.index} is a mixture of experts, each with linears of its own"
    return f"layer {layer.index} has no MLP with an input and an output projection"


Need = tuple[tuple[str, ...], Callable[[Layer], bool], Callable[[Layer], str]]

_NEEDS: tuple[Need, ...] = (
    (
        ("attn_stream_in", "q_input", "k_input", "v_input", "q", "k", "value"),
        lambda layer: layer.projects,
        _projections_missing,
    ),
    (("attn_gate",), lambda layer: layer.gated_q, lambda layer: "the family puts no gate on attention's output"),
    (("q_rot", "k_rot", "attn_scores", "attn_probs"), lambda layer: layer.attends, _projections_missing),
    (("z", "attn_result"), lambda layer: layer.attends and "o" in layer.parts, _projections_missing),
    (("mlp_stream_in", "mlp_in", "mlp_out", "mlp_out_post"), _has_mlp, lambda layer: "the block has one sublayer, and no MLP"),
    (("mlp_pre", "mlp_act"), lambda layer: "down" in layer.parts, _no_linears),
    (
        ("mlp_pre_linear",),
        lambda layer: bool({"gate", "gate_up"} & layer.parts.keys()),
        lambda layer: "its MLP is not gated, so it has one input branch" if "down" in layer.parts else _no_linears(layer),
    ),
    (
        ("router_logits", "router_probs", "expert_weights", "expert_indices"),
        lambda layer: "router" in layer.parts,
        lambda layer: f"layer {layer.index} has no router over experts",
    ),
    (
        ("resid_mid",),
        lambda layer: not layer.parallel and _has_mlp(layer),
        lambda layer: (
            "attention and MLP run in parallel from one stream, so there is no stream between them"
            if layer.parallel
            else "the block has one sublayer, so there is no stream between two"
        ),
    ),
)
_NORM_NEEDS = {
    "attn_norm": "there is no norm between the stream and attention",
    "mlp_norm": "there is no norm between the stream and the MLP",
    "attn_post_norm": "the family has no norm after attention",
    "mlp_post_norm": "the family has no norm after the MLP",
    "q_norm": "the family has no norm on queries and keys",
    "k_norm": "the family has no norm on queries and keys",
}


def why_absent(tree: Tree, facts: Facts, address: Address) -> str | None:
    """None, or the reason as a sentence."""
    if address.point == "pos_embed" and tree.pos_embed is None:
        return f"its positions are {facts.positions}, so there is no position embedding"
    if address.point.startswith("embed_norm_") and tree.embed_norm is None:
        return "the family has no norm on the token embedding"
    if address.layer is None:
        return None
    layer = tree.layers[address.layer]
    for points, has, sentence in _NEEDS:
        if address.point in points and not has(layer):
            return sentence(layer)
    for role, sentence in _NORM_NEEDS.items():
        if address.point.startswith(f"{role}_") and role not in layer.norms:
            return sentence
    if address.point == "attn_stream_in" and facts.n_kv_heads != facts.n_heads:
        return "query heads share key and value heads, so one copy a query head cannot feed them; use q_input, k_input, v_input"
    return None
