"""Proves at load, on this very checkpoint, that the points are where the table of roles says.

One short forward is read at every point, and each identity that the arithmetic of a decoder promises is tested. A broken
identity of the stream refuses the model; a broken one elsewhere refuses the points that rest on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

# what is promised, the points that rest on it, and two tensors that must then be equal
Check = tuple[str, tuple[str, ...], Callable[[], tuple[Tensor, Tensor]]]


@torch.no_grad()
def self_check(engine: EagerEngine) -> dict[str, str]:
    """Points of this model that could not be proved, each with the reason. Raises `LoadFailed` if the stream itself fails."""
    facts = engine.facts
    n = min(5, facts.n_ctx, facts.d_vocab)
    batch = Batch(torch.arange(n, device=facts.device)[None] * (facts.d_vocab // n))
    seen: dict[Address, Tensor] = {}
    taps = [Tap(a, lambda value, a=a: seen.__setitem__(a, value.detach()), reads=True) for a in _served(engine)]
    plain = engine.run(batch, ())
    try:
        tapped = engine.run(batch, taps)
    except Exception as error:
        message = f"{facts.architecture} does not fit the table of roles: reading every point fails ({error})"
        raise LoadFailed(message) from error
    unproved: dict[str, str] = {}
    for promise, points, pair in _checks(engine, batch, seen, tapped, plain):
        error = _relative_error(pair)
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
# norm -> what it reads, what it makes, and the points besides its own that rest on the one and on the other
_NORMS = {
    "attn_norm": ("resid_pre", "attn_in", _BRANCH, _BRANCH),
    "q_norm": ("q", "q_norm_out", ("q_norm_in",), ()),
    "k_norm": ("k", "k_norm_out", ("k_norm_in",), ()),
    "attn_post_norm": ("attn_out", "attn_out_post", ("attn_out_post",), ()),
    "mlp_norm": ("resid_mid", "mlp_in", ("mlp_stream_in", "resid_mid"), ("mlp_stream_in",)),
    "mlp_post_norm": ("mlp_out", "mlp_out_post", ("mlp_out_post",), ()),
}


def _served(engine: EagerEngine) -> Iterator[Address]:
    for point in POINTS.values():
        for layer in range(engine.facts.n_layers) if point.layered else (None,):
            address = Address(point.name, layer)
            if point.name not in _BRANCH and engine.refuses(address, "read") is None:
                yield address


def _checks(
    engine: EagerEngine, batch: Batch, seen: dict[Address, Tensor], tapped: Tensor, plain: Tensor
) -> Iterator[Check]:
    yield "the explicit attention gives the checkpoint's own logits", _INSIDE, lambda: (tapped, plain)
    yield from _global_checks(engine, batch, lambda point, layer=None: seen[Address(point, layer)])
    for layer in range(engine.facts.n_layers):

        def at(point: str, layer: int = layer) -> Tensor | None:
            return seen.get(Address(point, layer))

        yield from _norm_checks(engine, layer, at)
        yield from _layer_checks(engine, layer, at)


def _global_checks(engine: EagerEngine, batch: Batch, at: Callable[..., Tensor]) -> Iterator[Check]:
    weights, facts = engine.weights, engine.facts
    yield "embeddings = W_E[tokens]", ("embeddings",), lambda: (at("embeddings"), weights("embed")[batch.tokens])
    learned = facts.positions == "learned"
    yield (
        "resid_pre.0 = embeddings (+ pos_embed)",
        ("embeddings", "pos_embed"),
        lambda: (at("resid_pre", 0), at("embeddings") + at("pos_embed") if learned else at("embeddings")),
    )
    for layer in range(1, facts.n_layers):
        promise = f"resid_pre.{layer} = resid_post.{layer - 1}"
        yield promise, ("resid_pre",), lambda: (at("resid_pre", layer), at("resid_post", layer - 1))
    finish = engine.tree.final_norm.finish
    yield (
        "final_norm = normalized * gain + bias",
        ("final_norm",),
        lambda: (at("final_norm"), finish(at("final_norm_normalized"), facts.dtype)),
    )
    yield (
        "lm_head = final_norm W_U + b_U",
        ("lm_head",),
        lambda: (at("lm_head"), at("final_norm") @ weights("unembed") + weights("unembed_bias")),
    )
    cap = facts.logit_softcap
    yield (
        "logits = lm_head, soft-capped where the config says so",
        ("logits",),
        lambda: (at("logits"), at("lm_head") if cap is None else cap * torch.tanh(at("lm_head") / cap)),
    )


def _norm_checks(engine: EagerEngine, layer: int, at: Callable[[str], Tensor]) -> Iterator[Check]:
    for role, norm in engine.tree.layers[layer].norms.items():
        reads, makes, rest_on_input, rest_on_formula = _NORMS[role]
        reads = "resid_pre" if at(reads) is None else reads  # parallel blocks have no stream between
        own = (f"{role}_scale", f"{role}_normalized")

        def expected() -> Tensor:
            divided, scale = norm.parts(at(reads))
            return divided / scale

        yield f"in layer {layer} {role} reads {reads}", (*own, *rest_on_input), lambda: (at(own[1]), expected())
        yield (
            f"in layer {layer} {makes} = normalized * gain + bias",
            (*own, *rest_on_formula),
            lambda: (at(makes), norm.finish(at(own[1]), engine.facts.dtype)),
        )


def _layer_checks(engine: EagerEngine, layer: int, at: Callable[[str], Tensor]) -> Iterator[Check]:
    facts, parts, here = engine.facts, engine.tree.layers[layer].parts, f"in layer {layer} "

    def linear(x: str, name: str) -> Tensor:
        return at(x) @ engine.weights(name, layer) + engine.weights(f"{name}_bias", layer)

    def projected(part: str) -> Tensor:
        weight, bias = engine.weights(part, layer), engine.weights(f"{part}_bias", layer)
        return torch.einsum("bpd,hdk->bphk", at("attn_in"), weight) + bias

    def lengths(part: str) -> tuple[Tensor, Tensor]:
        before = at(f"{part}_norm_out") if facts.qk_norm else at(part)
        return at(f"{part}_rot").float().norm(dim=-1), before.float().norm(dim=-1)

    def mixed() -> Tensor:
        values = at("value").repeat_interleave(facts.n_heads // facts.n_kv_heads, dim=2)
        return torch.einsum("bhqk,bkhd->bqhd", at("attn_probs"), values)

    def activated() -> Tensor:
        activated = parts["act"](at("mlp_pre"))
        return activated * at("mlp_pre_linear") if facts.gated_mlp else activated

    yield (
        here + "resid_post = resid_pre + attn_out_post + mlp_out_post",
        _STREAM[:4],
        lambda: (at("resid_post"), at("resid_pre") + at("attn_out_post") + at("mlp_out_post")),
    )
    for part, point in (("q", "q"), ("k", "k"), ("v", "value")):
        yield f"{here}{point} = attn_in W + b", (point, f"{part}_input"), lambda: (at(point), projected(part))
    for part in "qk":  # a rotation keeps lengths
        yield f"{here}{part}_rot is {part} rotated", (part, f"{part}_input", f"{part}_rot"), lambda: lengths(part)
    yield here + "z = pattern value", ("value", "v_input", "z", "attn_probs"), lambda: (at("z"), mixed())
    yield (
        here + "attn_out = sum of results + b_O",
        ("attn_result",),
        lambda: (at("attn_out"), at("attn_result").sum(2) + engine.weights("o_bias", layer)),
    )
    gated = {"mlp_pre": "mlp_gate", "mlp_pre_linear": "mlp_in"}
    for point, name in gated.items() if facts.gated_mlp else [("mlp_pre", "mlp_in")]:
        yield f"{here}{point} = mlp_in W + b", (point,), lambda: (at(point), linear("mlp_in", name))
    yield here + "mlp_out = mlp_act W_out + b_out", ("mlp_act",), lambda: (at("mlp_out"), linear("mlp_act", "mlp_out"))
    if "act" in parts:
        promise = here + "mlp_act = act(mlp_pre), times mlp_pre_linear where gated"
        yield promise, ("mlp_pre", "mlp_pre_linear"), lambda: (at("mlp_act"), activated())


def _relative_error(pair: Callable[[], tuple[Tensor, Tensor]]) -> float:
    """Infinite where the two sides do not even fit together."""
    try:
        got, expected = pair()
    except (RuntimeError, TypeError, AttributeError, KeyError):  # shapes that do not fit, a value that is not there
        return float("inf")
    if got is None or expected is None or got.shape != expected.shape:
        return float("inf")
    got, expected = got.double(), expected.double()
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    return float("inf") if bool(error.isnan()) else float(error)
