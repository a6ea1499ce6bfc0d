"""Where each point lives in the tree, and what happens there, as two tables.

A place is a side of the module that plays a role, `"attn.in"`. `PLACES` names the places that a point needs; a place whose
role the family lacks is passed over. `HANDLERS` says what a place does with the value that goes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.eager.resolve import Norm
from engine.points import POINTS

if TYPE_CHECKING:
    from engine.eager.run import Run, State

INSIDE = ("q_rot", "k_rot", "attn_scores", "attn_probs")  # inside attention
_BRANCH = ("attn.in", "q.out", "k.out", "v.out", "qkv.out")

PLACES: dict[str, tuple[str, ...]] = {
    "tokens": (),  # fired by the engine before the model's forward
    "embed_norm_scale": ("embed_end.out",),
    "embed_norm_normalized": ("embed_end.out",),
    "embeddings": ("embed_end.out",),
    "pos_embed": ("pos_embed.out",),
    "resid_pre": ("block.in",),
    "attn_stream_in": _BRANCH,
    "q_input": _BRANCH,
    "k_input": _BRANCH,
    "v_input": _BRANCH,
    "attn_norm_scale": _BRANCH,
    "attn_norm_normalized": _BRANCH,
    "attn_in": ("attn.in",),
    "q": ("q.out", "qkv.out"),
    "attn_gate": ("q.out",),
    "k": ("k.out", "qkv.out"),
    "value": ("v.out", "qkv.out"),
    "q_norm_in": ("q_norm.in",),
    "q_norm_scale": ("q_norm.out",),
    "q_norm_normalized": ("q_norm.out",),
    "q_norm_out": ("q_norm.out",),
    "k_norm_in": ("k_norm.in",),
    "k_norm_scale": ("k_norm.out",),
    "k_norm_normalized": ("k_norm.out",),
    "k_norm_out": ("k_norm.out",),
    "q_rot": (),  # these four are inside attention
    "k_rot": (),
    "attn_scores": (),
    "attn_probs": (),
    "z": ("o.in",),
    "attn_result": ("o.in", "attn_end.out"),
    "attn_out": ("attn_end.out",),
    "attn_post_norm_scale": ("attn_post_norm.out",),
    "attn_post_norm_normalized": ("attn_post_norm.out",),
    "attn_out_post": ("attn_end.out", "attn_post_norm.out"),
    "resid_mid": ("attn_end.out", "attn_post_norm.out"),
    "mlp_stream_in": ("mlp_start.in",),
    "mlp_norm_scale": ("mlp_start.in",),
    "mlp_norm_normalized": ("mlp_start.in",),
    "mlp_in": ("mlp_start.in",),
    "router_logits": (),  # these two are inside the router
    "router_probs": (),
    "expert_weights": ("router.out",),
    "expert_indices": ("router.out",),
    "mlp_pre": ("gate.out", "up.out", "gate_up.out"),
    "mlp_pre_linear": ("up.out", "gate_up.out"),
    "mlp_act": ("down.in",),
    "mlp_out": ("mlp_end.out",),
    "mlp_post_norm_scale": ("mlp_post_norm.out",),
    "mlp_post_norm_normalized": ("mlp_post_norm.out",),
    "mlp_out_post": ("mlp_end.out", "mlp_post_norm.out"),
    "resid_post": ("block.out",),
    "final_norm_scale": ("final_norm.out",),
    "final_norm_normalized": ("final_norm.out",),
    "final_norm": ("final_norm.out",),
    "lm_head": ("lm_head.out",),
    "logits": (),  # fired by the engine after the model's forward
}
assert PLACES.keys() == POINTS.keys()


def _fires(point: str) -> Callable[..., Tensor]:
    """A place where the value is the point's as it is."""
    return lambda run, state, value, *_: run.fire(point, state, value)


def _block_in(run: Run, state: State, x: Tensor) -> Tensor:
    state.stream = run.fire("resid_pre", state, x)
    if state.layer.parallel:
        state.mlp_stream = state.stream
    return state.stream


_BRANCH_POINTS = ("attn_stream_in", "q_input", "k_input", "v_input", "attn_norm_scale", "attn_norm_normalized")


def _attn_in(run: Run, state: State, x: Tensor) -> Tensor:
    if any(run.tapped(point, state) for point in _BRANCH_POINTS):
        if state.layer.projects:
            _attention_branches(run, state, x.dtype)
        else:  # nothing apart reads the norm's output, so it is seen once and edited whole
            new, edited = _through_norm(run, state, "attn_norm", state.norm("attn_norm"), state.stream, False, x.dtype)
            x = new if edited else x
    return run.fire("attn_in", state, x)


def _attention_branches(run: Run, state: State, dtype: torch.dtype) -> None:
    """q, k and v read the stream through a norm of their own each: what is edited on one branch reaches only that one."""
    heads, norm = run.tree.heads, state.norm("attn_norm")
    shared, shared_edited = state.stream, False
    if run.tapped("attn_stream_in", state):
        shared, shared_edited = run.fire_copy("attn_stream_in", state, _by_head(state.stream, heads.n))
    for part, n in (("q", heads.n), ("k", heads.n_kv), ("v", heads.n_kv)):
        x, edited = shared, shared_edited
        if run.tapped(f"{part}_input", state):
            x, edited_input = run.fire_copy(f"{part}_input", state, _by_head(x, n) if x.dim() == 3 else x)
            edited = edited or edited_input
        editable = any(run.writes(point, state) for point in _BRANCH_POINTS)  # asked late: a tap may have added another
        if norm is not None and (editable or part == "v"):  # readers keep the last of three equal calls, v's
            x, edited = _through_norm(run, state, "attn_norm", norm, x, edited, dtype)
        if edited:
            state.override[part] = _project(run, state, part, x)


def _through_norm(
    run: Run, state: State, role: str, norm: Norm, x: Tensor, edited: bool, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """The norm's output for stream `x`, with taps on its scale and normalized value; x itself if nothing was edited."""
    divided, scale = norm.parts(x)
    scale, edited_scale = run.fire_copy(f"{role}_scale", state, scale)
    normalized, edited_value = run.fire_copy(f"{role}_normalized", state, divided / scale)
    if edited or edited_scale or edited_value:
        return norm.finish(normalized, dtype), True
    return x, False


def _project(run: Run, state: State, part: str, x: Tensor) -> Tensor:
    """q, k or v `[b, p, heads, dh]` of a branch input `[b, p, D]`, or `[b, p, heads, D]` with one copy a head."""
    parts, heads = state.layer.parts, run.tree.heads
    if x.dim() == 4:
        weight, bias = run.weights(part, state.index), run.weights(f"{part}_bias", state.index)
        return torch.einsum("bphd,hdk->bphk", x, weight.to(x)) + bias.to(x)
    if part in parts:
        projected = parts[part].forward(x).unflatten(-1, (heads.n if part == "q" else heads.n_kv, -1))
        return projected[..., : heads.d]  # a gate may stand behind a query
    return state.layer.layout.split(parts["qkv"].forward(x), heads)["qkv".index(part)]


def _projection_out(part: str, point: str) -> Callable[..., Tensor]:
    def handler(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
        value = state.override.pop(part, y.unflatten(-1, (-1, run.tree.heads.d)))
        return run.fire(point, state, value).flatten(-2)

    return handler


def _q_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    if not state.layer.gated_q:
        return _projection_out("q", "q")(run, state, y, x)
    q, gate = y.unflatten(-1, (run.tree.heads.n, -1)).chunk(2, -1)
    q = run.fire("q", state, state.override.pop("q", q))
    return torch.cat([q, run.fire("attn_gate", state, gate)], -1).flatten(-2)


def _qkv_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    parts, edits, new = (("q", "q"), ("k", "k"), ("v", "value")), bool(state.override), []
    for (part, point), value in zip(parts, state.layer.layout.split(y, run.tree.heads)):
        new.append(run.fire(point, state, state.override.pop(part, value)))
        edits = edits or run.writes(point, state)
    return state.layer.layout.join(*new) if edits else y


def _norm_out(role: str, point: str) -> Callable[..., Tensor]:
    """A norm whose output goes nowhere else, so that an edit of its parts can replace the output."""

    def handler(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
        return run.fire(point, state, _norm_parts(run, state, role, y, x))

    return handler


def _norm_parts(run: Run, state: State, role: str, y: Tensor, x: Tensor) -> Tensor:
    if not (run.tapped(f"{role}_scale", state) or run.tapped(f"{role}_normalized", state)):
        return y
    norm = getattr(run.tree, role) if state.layer is None else state.norm(role)
    new, edited = _through_norm(run, state, role, norm, x, False, y.dtype)
    return new if edited else y


def _by_position(run: Run, state: State, x: Tensor) -> Tensor:
    """What a norm of q or k sees, as `[b, p, heads, dh]`."""
    if x.dim() == 3:  # one norm over all heads together
        return x.unflatten(-1, (-1, run.tree.heads.d))
    return x.transpose(1, 2) if state.layer.heads_first else x


def _as_seen(state: State, x: Tensor, like: Tensor) -> Tensor:
    """`[b, p, heads, dh]` the way the norm sees it."""
    if like.dim() == 3:
        return x.flatten(-2)
    return x.transpose(1, 2) if state.layer.heads_first else x


def _qk_norm_in(role: str) -> Callable[..., Tensor]:
    def handler(run: Run, state: State, x: Tensor) -> Tensor:
        return _as_seen(state, run.fire(f"{role}_in", state, _by_position(run, state, x)), x)

    return handler


def _qk_norm_out(role: str) -> Callable[..., Tensor]:
    def handler(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
        y = _qk_norm_parts(run, state, role, y, x)
        return _as_seen(state, run.fire(f"{role}_out", state, _by_position(run, state, y)), y)

    return handler


def _qk_norm_parts(run: Run, state: State, role: str, y: Tensor, x: Tensor) -> Tensor:
    if not (run.tapped(f"{role}_scale", state) or run.tapped(f"{role}_normalized", state)):
        return y
    divided, scale = state.norm(role).parts(x)
    scale = scale[..., None] if x.dim() == 3 else _as_seen(state, scale, x)  # [b, p, heads or 1, 1]
    scale, edited = run.fire_copy(f"{role}_scale", state, scale)
    normalized = _by_position(run, state, divided) / scale
    normalized, edited_value = run.fire_copy(f"{role}_normalized", state, normalized)
    if not (edited or edited_value):
        return y
    return state.norm(role).finish(_as_seen(state, normalized, x), y.dtype)


def _o_in(run: Run, state: State, x: Tensor) -> Tensor:
    z = run.fire("z", state, x.unflatten(-1, (run.tree.heads.n, -1)))
    if run.tapped("attn_result", state):
        result = torch.einsum("bphd,hdm->bphm", z, run.weights("o", state.index).to(z))
        result, edited = run.fire_copy("attn_result", state, result)
        if edited:
            state.override["attn"] = result.sum(2) + run.weights("o_bias", state.index).to(z)
    return z.flatten(-2)


def _attn_end(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    """Attention's output is its output projection's: some families add the stream before their module returns."""
    y = run.fire("attn_out", state, state.override.pop("attn", y))
    return y if state.norm("attn_post_norm") else _attention_adds(run, state, y)


def _attn_post_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _attention_adds(run, state, _norm_parts(run, state, "attn_post_norm", y, x))


def _attention_adds(run: Run, state: State, y: Tensor) -> Tensor:
    """What attention adds to the stream. resid_mid is written here too: the block holds the sum in a local of its own."""
    added = _fire_scaled(run, state, "attn_out_post", y, state.layer.adds)
    if not run.tapped("resid_mid", state):
        return added
    mid = run.fire("resid_mid", state, state.stream + added * state.layer.adds)
    return (mid - state.stream) / state.layer.adds if run.writes("resid_mid", state) else added


def _fire_scaled(run: Run, state: State, point: str, value: Tensor, scale: float) -> Tensor:
    """Fires on `value * scale`, which the model computes from what is returned here."""
    if scale == 1 or not run.tapped(point, state):
        return run.fire(point, state, value)
    new = run.fire(point, state, value * scale)
    return new / scale if run.writes(point, state) else value


def _mlp_norm_in(run: Run, state: State, x: Tensor) -> Tensor:
    if not state.layer.parallel:
        state.mlp_stream = x
    return x


def _mlp_in(run: Run, state: State, x: Tensor) -> Tensor:
    """The norm's parts are edited here and not at the norm, which some families share with attention."""
    if any(run.tapped(point, state) for point in ("mlp_stream_in", "mlp_norm_scale", "mlp_norm_normalized")):
        norm = state.norm("mlp_norm")
        stream, edited = run.fire_copy("mlp_stream_in", state, x if norm is None else state.mlp_stream)
        if norm is not None:
            stream, edited = _through_norm(run, state, "mlp_norm", norm, stream, edited, x.dtype)
        x = stream if edited else x
    return run.fire("mlp_in", state, x)


def _up_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("mlp_pre_linear" if "gate" in state.layer.parts else "mlp_pre", state, y)


def _gate_up_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    gate, up = run.fire("mlp_pre", state, gate), run.fire("mlp_pre_linear", state, up)
    edits = run.writes("mlp_pre", state) or run.writes("mlp_pre_linear", state)
    return torch.cat([gate, up], -1) if edits else y


def _mlp_end(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = run.fire("mlp_out", state, y)
    return y if state.norm("mlp_post_norm") else _fire_scaled(run, state, "mlp_out_post", y, state.layer.adds)


def _embed_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _fire_scaled(run, state, "embeddings", _norm_parts(run, state, "embed_norm", y, x), run.tree.embed_scale)


def _router_out(run: Run, state: State, out: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
    """(logits, weights of the chosen experts, their indices), one row a token; other forms of router are not read."""
    if not (isinstance(out, tuple) and len(out) == 3 and all(part.dim() == 2 for part in out)):
        return out
    logits, weights, indices = out
    shape = (run.batch_size, -1)
    weights = run.fire("expert_weights", state, weights.unflatten(0, shape)).flatten(0, 1)
    return logits, weights, run.fire("expert_indices", state, indices.unflatten(0, shape)).flatten(0, 1)


def _pos_embed_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = y.expand(run.batch_size, -1, -1)  # one row serves the batch where no mask tells its rows apart
    return run.fire("pos_embed", state, y.clone() if run.writes("pos_embed", state) else y)


def _by_head(x: Tensor, n: int) -> Tensor:
    """`[b, p, D]` -> `[b, p, n, D]`, the same stream for every head."""
    return x[:, :, None].expand(-1, -1, n, -1)


# in: (run, state, value) -> value; out: (run, state, output, input) -> output
HANDLERS: dict[str, Callable[..., Tensor]] = {
    "embed_end.out": _embed_out,
    "pos_embed.out": _pos_embed_out,
    "block.in": _block_in,
    "attn.in": _attn_in,
    "q.out": _q_out,
    "k.out": _projection_out("k", "k"),
    "v.out": _projection_out("v", "value"),
    "qkv.out": _qkv_out,
    "q_norm.in": _qk_norm_in("q_norm"),
    "q_norm.out": _qk_norm_out("q_norm"),
    "k_norm.in": _qk_norm_in("k_norm"),
    "k_norm.out": _qk_norm_out("k_norm"),
    "o.in": _o_in,
    "attn_end.out": _attn_end,
    "attn_post_norm.out": _attn_post_norm_out,
    "mlp_norm.in": _mlp_norm_in,
    "mlp_start.in": _mlp_in,
    "gate.out": _fires("mlp_pre"),
    "up.out": _up_out,
    "gate_up.out": _gate_up_out,
    "down.in": _fires("mlp_act"),
    "mlp_end.out": _mlp_end,
    "router.out": _router_out,
    "mlp_post_norm.out": _norm_out("mlp_post_norm", "mlp_out_post"),
    "block.out": _fires("resid_post"),
    "final_norm.out": _norm_out("final_norm", "final_norm"),
    "lm_head.out": _fires("lm_head"),
}
