"""Proves at load, on this very checkpoint, that the points are where the table of roles says.

One short forward is read at every point of the first and the last layer of each kind, and each identity that the arithmetic
of a decoder promises is tested. A broken identity of the stream refuses the model; a broken one elsewhere refuses the points
that rest on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.errors import LoadFailed
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap

if TYPE_CHECKING:
    from engine.eager.resolve import Layer, Norm
    from engine.eager.engine import EagerEngine

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}  # of the largest magnitude
_INDEX = re.compile(r"layer_?(idx|index|id|number)")  # what modules call the number of their layer
_STREAM = ("resid_pre", "attn_out_post", "mlp_out_post", "resid_post", "final_norm", "lm_head")

# what is promised, the points that rest on it, and two tensors that must then be equal
Check = tuple[str, tuple[str, ...], Callable[[], tuple[Tensor, Tensor]]]


@torch.no_grad()
def self_check(engine: EagerEngine) -> dict[str, str]:
    """Points of this model that could not be proved, each with the reason. Raises `LoadFailed` if the stream itself fails."""
    facts, layers = engine.facts, _proved_on(engine)
    n = min(5, facts.n_ctx, facts.d_vocab)
    batch = Batch(torch.arange(n, device=facts.device)[None] * (facts.d_vocab // n))
    plain = _watched_run(engine, batch)
    try:
        tapped, seen = _read_all(engine, batch, layers)
    except Exception as error:
        raise LoadFailed(f"{facts.architecture} does not fit the table of roles: reading every point fails ({error})") from error
    silent = {address.point for address in _served(engine, layers)} - {address.point for address in seen}
    unproved = {point: "the forward of this family does not go through it" for point in silent}
    for promise, points, sides in _checks(engine, batch, seen, tapped, plain, layers):
        error = _relative_error(sides)
        if error <= _TOLERANCE[facts.dtype]:
            continue
        if set(points) & set(_STREAM):
            raise LoadFailed(
                f"{facts.architecture} does not fit the table of roles: {promise} should hold, but differs by {error:.1e} of "
                f"its largest value"
            )
        unproved |= {point: f"on this checkpoint {promise} does not hold (off by {error:.1e})" for point in points}
    return unproved


def _proved_on(engine: EagerEngine) -> list[int]:
    """The first and the last layer of each kind: layers of one kind have the same modules, shapes and settings."""
    kinds: dict[Any, list[int]] = {}
    for layer in engine.tree.layers:
        kind = tuple((name, *_kind(module)) for name, module in layer.block.named_modules())
        kinds.setdefault((kind, engine.facts.sliding_windows[layer.index]), []).append(layer.index)
    return sorted({index for alike in kinds.values() for index in (alike[0], alike[-1])})


def _kind(module: torch.nn.Module) -> tuple[Any, ...]:
    """What says how a module computes, but for its numbers and its layer's index."""
    shapes = tuple((name, None if p is None else (p.shape, p.dtype)) for name, p in module._parameters.items())
    settings = tuple((k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str)) and not _INDEX.search(k))
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    return type(module), shapes, settings, vars(module).get("forward"), hooked


def _watched_run(engine: EagerEngine, batch: Batch) -> Tensor:
    """The logits. Notes which blocks return the stream in a tuple, so that one that is passed by can stand in for it."""
    handles = []
    for layer in engine.tree.layers:

        def note(_: Any, __: Any, output: Any, layer: Layer = layer) -> None:
            layer.gives_tuple = isinstance(output, tuple)

        handles.append(layer.block.register_forward_hook(note))
    try:
        return engine.run(batch, ())
    finally:
        for handle in handles:
            handle.remove()


def _read_all(engine: EagerEngine, batch: Batch, layers: list[int]) -> tuple[Tensor, dict[Address, Tensor]]:
    """The logits and the value of every point on `layers`. Points whose value the model goes on to edit in place are noted, and from
    then on handed out as copies."""
    seen: dict[Address, Tensor] = {}
    versions: dict[Address, int] = {}

    def keep(address: Address, value: Tensor) -> None:
        seen[address], versions[address] = value, value._version

    taps = [Tap(a, lambda value, a=a: keep(a, value), reads=True) for a in _served(engine, layers)]
    logits = engine.run(batch, taps)
    edited = {address.point for address, value in seen.items() if value._version != versions[address]}
    if not edited:
        return logits, seen
    engine.tree.edited_in_place |= edited
    return engine.run(batch, taps), seen


_INSIDE = ("q_rot", "k_rot", "attn_scores", "attn_probs")
_BRANCH = ("attn_stream_in", "q_input", "k_input", "v_input")  # copies of the stream; they rest on the norm's identity
# norm -> what it reads, what it makes, and the points besides its own that rest on the one and on the other
_NORMS = {
    "attn_norm": ("resid_pre", "attn_in", _BRANCH, _BRANCH),
    "q_norm": ("q_norm_in", "q_norm_out", ("q_norm_in",), ()),
    "k_norm": ("k_norm_in", "k_norm_out", ("k_norm_in",), ()),
    "attn_post_norm": ("attn_out", "attn_out_post", ("attn_out_post",), ()),
    "mlp_norm": ("resid_mid", "mlp_in", ("mlp_stream_in", "resid_mid"), ("mlp_stream_in",)),
    "mlp_post_norm": ("mlp_out", "mlp_out_post", ("mlp_out_post",), ()),
}


def _served(engine: EagerEngine, layers: list[int]) -> Iterator[Address]:
    """Every point on `layers`, and the two ends of every block."""
    for point in POINTS.values():
        everywhere = range(engine.facts.n_layers) if point.name in ("resid_pre", "resid_post") else layers
        for layer in everywhere if point.layered else (None,):
            address = Address(point.name, layer)
            if point.name not in _BRANCH and engine.refuses(address, "read") is None:
                yield address


def _checks(
    engine: EagerEngine, batch: Batch, seen: dict[Address, Tensor], tapped: Tensor, plain: Tensor, layers: list[int]
) -> Iterator[Check]:
    yield "the explicit attention gives the checkpoint's own logits", _INSIDE, lambda: (tapped, plain)
    yield from _global_checks(engine, batch, lambda point, layer=None: seen[Address(point, layer)])
    for layer in layers:
        yield from _layer_checks(engine, layer, lambda point: seen.get(Address(point, layer)))  # noqa: B023  used at once


def _global_checks(engine: EagerEngine, batch: Batch, at: Callable[..., Tensor]) -> Iterator[Check]:
    weights, facts, tree = engine.weights, engine.facts, engine.tree
    if tree.embed_norm is None:
        yield "embeddings = W_E[tokens]", ("embeddings",), lambda: (at("embeddings"), weights("embed")[batch.tokens])
    else:
        points = ("embed_norm_scale", "embed_norm_normalized")
        yield (
            "embed_norm reads W_E[tokens]",
            points,
            lambda: (at("embed_norm_normalized"), _normalized(tree.embed_norm, weights("embed")[batch.tokens])),
        )
        yield (
            "embeddings = normalized * gain + bias",
            ("embeddings", *points),
            lambda: (at("embeddings"), tree.embed_norm.finish(at("embed_norm_normalized"), facts.dtype)),
        )
    learned = facts.positions == "learned"
    yield (
        "resid_pre.0 = embeddings (+ pos_embed)",
        ("embeddings", "pos_embed"),
        lambda: (at("resid_pre", 0), at("embeddings") + at("pos_embed") if learned else at("embeddings")),
    )
    for layer in range(1, facts.n_layers):
        promise = f"resid_pre.{layer} = resid_post.{layer - 1}"
        yield promise, ("resid_pre",), lambda: (at("resid_pre", layer), at("resid_post", layer - 1))  # noqa: B023
    yield (
        "final_norm = normalized * gain + bias",
        ("final_norm",),
        lambda: (at("final_norm"), tree.final_norm.finish(at("final_norm_normalized"), facts.dtype)),
    )
    yield (
        "lm_head = final_norm W_U + b_U",
        ("lm_head",),
        lambda: (at("lm_head"), at("final_norm") @ weights("unembed") + weights("unembed_bias")),
    )

    def capped() -> Tensor:
        scaled, cap = at("lm_head") * tree.logit_scale, facts.logit_softcap
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    yield "logits = lm_head, scaled and soft-capped as the config says", ("logits",), lambda: (at("logits"), capped())


def _layer_checks(engine: EagerEngine, index: int, at: Callable[[str], Tensor | None]) -> Iterator[Check]:
    """Every identity whose points this layer has."""
    for needs, points, promise, sides in _identities(engine, index):
        values = [at(point) for point in needs]
        if all(value is not None for value in values):
            yield f"in layer {index} {promise}", points, lambda: sides(*values)  # noqa: B023


Identity = tuple[tuple[str, ...], tuple[str, ...], str, Callable[..., tuple[Tensor, Tensor]]]


def _identities(engine: EagerEngine, index: int) -> Iterator[Identity]:
    """(points it needs, points that rest on it, what is promised, the two sides from the needed values)."""
    layer, facts = engine.tree.layers[index], engine.facts
    weight = lambda name: engine.weights(name, index)  # noqa: E731
    yield (
        ("resid_pre", "attn_out_post", "mlp_out_post", "resid_post"),
        _STREAM[:4],
        "resid_post = resid_pre + attn_out_post + mlp_out_post",
        lambda pre, attn, mlp, post: (post, pre + attn + mlp),
    )
    if layer.module("mlp_end") is None:
        yield (
            ("resid_pre", "attn_out_post", "resid_post"),
            _STREAM[:4],
            "resid_post = resid_pre + attn_out_post",
            lambda pre, attn, post: (post, pre + attn),
        )
    for role, norm in layer.norms.items():
        reads, makes, rest_on_input, rest_on_formula = _NORMS[role]
        reads = "resid_pre" if role == "mlp_norm" and layer.parallel else reads
        own = (f"{role}_scale", f"{role}_normalized")
        yield (
            (reads, own[1]),
            (*own, *rest_on_input),
            f"{role} reads {reads}",
            lambda x, normalized, norm=norm: (normalized, _normalized(norm, x)),
        )
        yield (
            (own[1], makes),
            (*own, *rest_on_formula),
            f"{makes} = normalized * gain + bias",
            lambda normalized, out, norm=norm: (out, _finished(norm, normalized, facts.dtype)),
        )
    for part, point in (("q", "q"), ("k", "k"), ("v", "value")):
        yield (
            ("attn_in", point),
            (point, f"{part}_input"),
            f"{point} = attn_in W + b",
            lambda x, out, part=part: (out, torch.einsum("bpd,hdk->bphk", x, weight(part)) + weight(f"{part}_bias")),
        )
    for part in "qk":
        before = f"{part}_norm_out" if f"{part}_norm" in layer.norms else part
        yield (
            (before, f"{part}_rot"),
            (part, f"{part}_input", f"{part}_rot"),
            f"{part}_rot is {part} rotated",
            lambda x, rotated: (_lengths(rotated), _lengths(x)),
        )
    mixed = lambda pattern, value: torch.einsum("bhqk,bkhd->bqhd", pattern, _per_query_head(value, pattern))  # noqa: E731
    if layer.gated_q:
        yield (
            ("attn_probs", "value", "attn_gate", "z"),
            ("value", "v_input", "z", "attn_probs", "attn_gate"),
            "z = pattern value sigmoid(gate)",
            lambda pattern, value, gate, z: (z, mixed(pattern, value) * torch.sigmoid(gate)),
        )
    else:
        yield (
            ("attn_probs", "value", "z"),
            ("value", "v_input", "z", "attn_probs"),
            "z = pattern value",
            lambda pattern, value, z: (z, mixed(pattern, value)),
        )
    yield (
        ("attn_result", "attn_out"),
        ("attn_result",),
        "attn_out = sum of results + b_O",
        lambda result, out: (out, result.sum(2) + weight("o_bias")),
    )
    yield (
        ("mlp_act", "mlp_out"),
        ("mlp_act",),
        "mlp_out = mlp_act W_out + b_out",
        lambda act, out: (out, act @ weight("mlp_out") + weight("mlp_out_bias")),
    )
    yield (
        ("router_logits", "router_probs"),
        ("router_probs",),
        "router_probs = softmax(router_logits)",
        lambda logits, probs: (probs, logits.float().softmax(-1)),
    )
    gated = bool({"gate", "gate_up"} & layer.parts.keys())
    for point, name in (("mlp_pre", "mlp_gate"), ("mlp_pre_linear", "mlp_in")) if gated else (("mlp_pre", "mlp_in"),):
        yield (
            ("mlp_in", point),
            (point,),
            f"{point} = mlp_in W + b",
            lambda x, pre, name=name: (pre, x @ weight(name) + weight(f"{name}_bias")),
        )
    act = layer.parts.get("act")
    if act is not None and gated:
        yield (
            ("mlp_pre", "mlp_pre_linear", "mlp_act"),
            ("mlp_pre", "mlp_pre_linear"),
            "mlp_act = act(mlp_pre) * mlp_pre_linear",
            lambda pre, linear, out: (out, act(pre) * linear),
        )
    elif act is not None:
        yield (("mlp_pre", "mlp_act"), ("mlp_pre",), "mlp_act = act(mlp_pre)", lambda pre, out: (out, act(pre)))


def _normalized(norm: Norm, x: Tensor) -> Tensor:
    if norm.gain.numel() in (1, x.shape[-1]):
        return torch.div(*norm.parts(x))
    return torch.div(*norm.parts(x.flatten(-2))).view(x.shape)


def _finished(norm: Norm, normalized: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm's output; one that goes over all heads of q or k together has a gain as wide as all of them."""
    if norm.gain.numel() in (1, normalized.shape[-1]):
        return norm.finish(normalized, dtype)
    return norm.finish(normalized.flatten(-2), dtype).view(normalized.shape)


def _lengths(x: Tensor) -> Tensor:
    """A rotation keeps lengths, up to a factor that some families put on all queries."""
    lengths = x.float().norm(dim=-1)
    return lengths / lengths.norm()


def _per_query_head(value: Tensor, pattern: Tensor) -> Tensor:
    return value.repeat_interleave(pattern.shape[1] // value.shape[2], dim=2)


def _relative_error(sides: Callable[[], tuple[Tensor, Tensor]]) -> float:
    """Infinite where the two sides do not even fit together."""
    try:
        got, expected = sides()
    except (RuntimeError, TypeError, AttributeError, KeyError):  # shapes that do not fit, a value that is not there
        return float("inf")
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.double(), expected.double()
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    return float("inf") if bool(error.isnan()) else float(error)
