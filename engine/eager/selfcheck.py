"""Proves at load, on this very checkpoint, that the points are where the table of roles says.

One short forward is read at every point, and each identity that the arithmetic of a decoder promises is tested. A broken
identity of the stream refuses the model; a broken one elsewhere refuses the points that rest on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import LoadFailed
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap

if TYPE_CHECKING:
    from engine.eager.engine import EagerEngine

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}  # of the largest magnitude
_STREAM = ("resid_pre", "attn_out_post", "mlp_out_post", "resid_post", "final_norm", "lm_head")

Check = tuple[str, tuple[str, ...], Tensor, Tensor]  # what is promised, the points that rest on it, two equal tensors


@torch.no_grad()
def self_check(engine: EagerEngine) -> dict[str, str]:
    """Points of this model that could not be proved, each with the reason. Raises `LoadFailed` if the stream itself fails."""
    facts = engine.facts
    n = min(5, facts.n_ctx, facts.d_vocab)
    batch = Batch(torch.arange(n, device=facts.device)[None] * (facts.d_vocab // n))
    seen: dict[Address, Tensor] = {}
    taps = [Tap(a, lambda value, a=a: seen.__setitem__(a, value.detach()), reads=True) for a in _served(engine)]
    plain = engine.run(batch, ())
    tapped = engine.run(batch, taps)
    checks = [("the explicit attention gives the checkpoint's own logits", _INSIDE, tapped, plain)]
    checks += _global_checks(engine, batch, seen)
    for layer in range(facts.n_layers):
        checks += _layer_checks(engine, layer, lambda point, layer=layer: seen.get(Address(point, layer)))
    unproved: dict[str, str] = {}
    for promise, points, got, expected in checks:
        error = _relative_error(got, expected)
        if error <= _TOLERANCE[facts.dtype]:
            continue
        if set(points) & set(_STREAM):
            raise LoadFailed(
                f"{facts.architecture} does not fit the table of roles: {promise} should hold, but differs by {error:.1e} of "
                f"its largest value"
            )
        unproved |= {point: f"on this checkpoint {promise} does not hold (off by {error:.1e})" for point in points}
    return unproved


_INSIDE = ("q_rot", "k_rot", "attn_scores", "attn_probs")
_BRANCH = ("attn_stream_in", "q_input", "k_input", "v_input")  # copies of the stream; they rest on the norm's identity
# norm -> the point that it makes, and the points beside its scale and normalized value that rest on its formula
_NORMS = {
    "attn_norm": ("attn_in", _BRANCH),
    "q_norm": ("q_norm_out", ()),
    "k_norm": ("k_norm_out", ()),
    "attn_post_norm": ("attn_out_post", ()),
    "mlp_norm": ("mlp_in", ("mlp_stream_in",)),
    "mlp_post_norm": ("mlp_out_post", ()),
}


def _served(engine: EagerEngine) -> Iterator[Address]:
    for point in POINTS.values():
        for layer in range(engine.facts.n_layers) if point.layered else (None,):
            address = Address(point.name, layer)
            if point.name not in _BRANCH and engine.refuses(address, "read") is None:
                yield address


def _global_checks(engine: EagerEngine, batch: Batch, seen: dict[Address, Tensor]) -> Iterator[Check]:
    weights, at = engine.weights, lambda point, layer=None: seen[Address(point, layer)]
    yield "embeddings = W_E[tokens]", ("embeddings",), at("embeddings"), weights("embed")[batch.tokens]
    stream = at("embeddings")
    if engine.facts.positions == "learned":
        stream = stream + at("pos_embed")
    yield "resid_pre.0 = embeddings (+ pos_embed)", ("embeddings", "pos_embed"), at("resid_pre", 0), stream
    for layer in range(1, engine.facts.n_layers):
        yield f"resid_pre.{layer} = resid_post.{layer - 1}", ("resid_pre",), at("resid_pre", layer), at("resid_post", layer - 1)
    finished = engine.tree.final_norm.finish(at("final_norm_normalized"), engine.facts.dtype)
    yield "final_norm = normalized * gain + bias", ("final_norm",), at("final_norm"), finished
    unembedded = at("final_norm") @ weights("unembed") + weights("unembed_bias")
    yield "lm_head = final_norm W_U + b_U", ("lm_head",), at("lm_head"), unembedded
    cap = engine.facts.logit_softcap
    capped = at("lm_head") if cap is None else cap * torch.tanh(at("lm_head") / cap)
    yield "logits = lm_head, soft-capped where the config says so", ("logits",), at("logits"), capped


def _layer_checks(engine: EagerEngine, layer: int, at: Tensor) -> Iterator[Check]:
    weights, tree, facts = engine.weights, engine.tree, engine.facts
    norms = tree.layers[layer].norms
    here = f"in layer {layer} "
    mid = at("resid_pre") + at("attn_out_post")
    yield here + "resid_post = resid_pre + attn_out_post + mlp_out_post", _STREAM[:4], at("resid_post"), mid + at("mlp_out_post")
    if at("resid_mid") is not None:
        divided, scale = norms["mlp_norm"].parts(mid)
        normalized = ("mlp_norm_scale", "mlp_norm_normalized", "mlp_stream_in", "resid_mid")
        yield here + "the MLP's norm reads resid_mid", normalized, at("mlp_norm_normalized"), divided / scale
    for role, norm in norms.items():
        read, points = _NORMS[role]
        finished = norm.finish(at(f"{role}_normalized"), facts.dtype)
        yield f"{here}{read} = normalized * gain + bias", (*points, f"{role}_scale", f"{role}_normalized"), at(read), finished
    for part, point in (("q", "q"), ("k", "k"), ("v", "value")):
        projected = torch.einsum("bpd,hdk->bphk", at("attn_in"), weights(part, layer)) + weights(f"{part}_bias", layer)
        yield f"{here}{point} = attn_in W + b", (point, f"{part}_input"), at(point), projected
    for part in "qk":
        before = at(f"{part}_norm_out") if facts.qk_norm else at(part)
        lengths = at(f"{part}_rot").float().norm(dim=-1), before.float().norm(dim=-1)  # a rotation keeps lengths
        yield f"{here}{part}_rot is {part} rotated", (part, f"{part}_input", f"{part}_rot"), *lengths
    values = at("value").repeat_interleave(facts.n_heads // facts.n_kv_heads, dim=2)
    mixed = torch.einsum("bhqk,bkhd->bqhd", at("attn_probs"), values)
    yield here + "z = pattern value", ("value", "v_input", "z", "attn_probs"), at("z"), mixed
    yield here + "attn_out = sum of results + b_O", ("attn_result",), at("attn_out"), at("attn_result").sum(2) + weights("o_bias", layer)
    down = at("mlp_act") @ weights("mlp_out", layer) + weights("mlp_out_bias", layer)
    yield here + "mlp_out = mlp_act W_out + b_out", ("mlp_act",), at("mlp_out"), down
    for point, name in (("mlp_pre", "mlp_gate"), ("mlp_pre_linear", "mlp_in")) if facts.gated_mlp else (("mlp_pre", "mlp_in"),):
        up = at("mlp_in") @ weights(name, layer) + weights(f"{name}_bias", layer)
        yield f"{here}{point} = mlp_in W + b", (point,), at(point), up
    act = tree.layers[layer].parts.get("act")
    if act is not None:
        activated = act(at("mlp_pre"))
        activated = activated * at("mlp_pre_linear") if facts.gated_mlp else activated
        yield here + "mlp_act = act(mlp_pre), times mlp_pre_linear where gated", ("mlp_pre", "mlp_pre_linear"), at("mlp_act"), activated


def _relative_error(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.double(), expected.double()
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    return float("inf") if bool(error.isnan()) else float(error)
