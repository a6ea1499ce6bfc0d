"""One forward of the eager engine: which modules its taps live on, and what they see there.

A tap's point names the places it needs (`PLACES`), a place is a side of the module that plays a role, and `HANDLERS` says
what happens there. Hooks are installed for the run and always removed; only places that a tap needs cost anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from engine.eager.resolve import Layer, Norm, Tree
from engine.points import POINTS, Address
from engine.seam import Weights
from engine.taps import Taps, same

_BRANCH = ("block.in", "attn.in", "q.out", "k.out", "v.out", "qkv.out")
_MLP_BRANCH = ("block.in", "mlp_norm.in", "mlp.in")

# point -> the places that serve it; a place whose role the family lacks is passed over.
PLACES: dict[str, tuple[str, ...]] = {
    "embeddings": ("embed.out",),
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
    "q_rot": (),  # inside attention: served by the attention function
    "k_rot": (),
    "attn_scores": (),
    "attn_probs": (),
    "z": ("o.in",),
    "attn_result": ("o.in", "o.out"),
    "attn_out": ("attn.out",),
    "attn_post_norm_scale": ("attn_post_norm.out",),
    "attn_post_norm_normalized": ("attn_post_norm.out",),
    "attn_out_post": ("attn.out", "attn_post_norm.out"),
    "resid_mid": ("block.in", "attn.out", "attn_post_norm.out"),
    "mlp_stream_in": _MLP_BRANCH,
    "mlp_norm_scale": _MLP_BRANCH,
    "mlp_norm_normalized": _MLP_BRANCH,
    "mlp_in": ("mlp.in",),
    "mlp_pre": ("gate.out", "up.out", "gate_up.out"),
    "mlp_pre_linear": ("up.out", "gate_up.out"),
    "mlp_act": ("down.in",),
    "mlp_out": ("mlp.out",),
    "mlp_post_norm_scale": ("mlp_post_norm.out",),
    "mlp_post_norm_normalized": ("mlp_post_norm.out",),
    "mlp_out_post": ("mlp.out", "mlp_post_norm.out"),
    "resid_post": ("block.out",),
    "final_norm_scale": ("final_norm.out",),
    "final_norm_normalized": ("final_norm.out",),
    "final_norm": ("final_norm.out",),
    "lm_head": ("lm_head.out",),
    "tokens": (),  # fired by the engine around the model's forward
    "logits": (),
}

BEFORE_LAYERS = ("tokens", "embeddings", "pos_embed")

_current: ContextVar[Run | None] = ContextVar("run", default=None)


def current_run() -> Run | None:
    """The run whose forward is under way here, unless one of its taps is."""
    run = _current.get()
    return None if run is None or run.firing else run


class State:
    """What one layer carries between its modules during one forward. `layer` is None for what lies outside the blocks."""

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self.index = None if layer is None else layer.index
        self.stream: Tensor | None = None  # [b, p, D], what the attention branch reads
        self.mlp_stream: Tensor | None = None  # [b, p, D], what the MLP branch reads
        self.override: dict[str, Tensor] = {}  # q, k, v, attn: values that replace what the module is about to compute
        self.seen_value: Tensor | None = None  # [b, K, k, dh], as attention got it

    def norm(self, role: str) -> Norm | None:
        return None if self.layer is None else self.layer.norms.get(role)


class Run:
    """The taps of one forward, armed on a tree. Use as a context manager around the model's forward."""

    def __init__(self, tree: Tree, weights: Weights, taps: Taps, *, grad: bool, batch_size: int) -> None:
        self.tree, self.weights, self.taps, self.grad, self.batch_size = tree, weights, taps, grad, batch_size
        self.firing = False
        self.outside = State(None)
        self.states = [State(layer) for layer in tree.layers]
        self._by_attention = {id(state.layer.attn): state for state in self.states}
        self._armed: set[tuple[int, str]] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Run:
        for module in (self.tree.model, self.tree.trunk):  # a hook on a running module fires only if it had one at start
            self._handles.append(module.register_forward_hook(_nothing))
        self._token = _current.set(self)
        return self

    def arm_all(self, first_layer: int | None = None) -> None:
        """Arms the taps known so far, and from now on each one that is added; none before `first_layer`, if given."""
        self._first_layer = first_layer
        for address in self.taps.addresses():
            self.arm(address)
        self.taps.on_add = self.arm

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
        self.taps.on_add = None
        for handle in self._handles:
            handle.remove()
        self.states = []

    def on_input(self, module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> None:
        """Calls `act` with the hidden states that enter `module`; what it returns replaces them."""

        def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if current_run() is not self:
                return None
            if args:
                new = act(args[0])
                return None if new is None or new is args[0] else ((new, *args[1:]), kwargs)
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            new = act(kwargs[name])
            return None if new is None or new is kwargs[name] else (args, {**kwargs, name: new})

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def on_output(self, module: nn.Module, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Calls `act` with `module`'s output and input; what it returns replaces the output (of a tuple, the first)."""

        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if current_run() is not self:
                return None
            value = output[0] if isinstance(output, tuple) else output
            new = act(value, args[0] if args else next(iter(kwargs.values())))
            if new is value:
                return None
            return (new, *output[1:]) if isinstance(output, tuple) else new

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def arm(self, address: Address) -> None:
        """Puts hooks where `address` needs them, and a quiet one on the modules around them."""
        if self._first_layer is not None and (
            address.point in BEFORE_LAYERS if address.layer is None else address.layer < self._first_layer
        ):
            return  # what runs there is a stand-in, not the model
        state = self.outside if address.layer is None else self.states[address.layer]
        for place in PLACES[address.point]:
            role, side = place.split(".")
            module = self._module(role, state)
            if module is None or (id(module), place) in self._armed:
                continue
            self._armed.add((id(module), place))
            if state.layer is not None:
                for around in (state.layer.block, state.layer.attn, state.layer.mlp):
                    if (id(around), "around") not in self._armed:
                        self._armed.add((id(around), "around"))
                        self._handles.append(around.register_forward_hook(_nothing))
            self._install(HANDLERS[place], module, side, state)

    def _install(self, handler: Callable[..., Tensor], module: nn.Module, side: str, state: State) -> None:
        if side == "in":
            self.on_input(module, lambda x: handler(self, state, x))
        else:
            self.on_output(module, lambda y, x: handler(self, state, y, x))

    def _module(self, role: str, state: State) -> nn.Module | None:
        if state.layer is not None:
            return state.layer.module(role)
        return self.tree.final_norm.module if role == "final_norm" else getattr(self.tree, role)

    def attention_state(self, module: nn.Module) -> State | None:
        return self._by_attention.get(id(module))

    def tapped(self, point: str, state: State) -> bool:
        return Address(point, state.index) in self.taps

    def writes(self, point: str, state: State) -> bool:
        return self.taps.writes(Address(point, state.index))

    def fire(self, point: str, state: State, value: Tensor) -> Tensor:
        """Runs the taps at a point of a layer; the forward continues with what comes back."""
        address = Address(point, state.index)
        if address not in self.taps:
            return value
        self.firing = True
        try:
            return self.taps.fire(address, value)
        finally:
            self.firing = False

    def fire_copy(self, point: str, state: State, value: Tensor) -> tuple[Tensor, bool]:
        """Fires on a copy, for a value that the model does not itself hold; also tells whether it must be carried back.

        With gradients on it always must be, so that the gradient of the very tensor handed out exists.
        """
        if not self.writes(point, state):
            return self.fire(point, state, value), False
        result = self.fire(point, state, value.clone())
        return result, self.grad or not same(value, result)


def _nothing(*_: object) -> None:
    return None


# --- what happens at each place ---------------------------------------------------------------------------------------


def block_in(run: Run, state: State, x: Tensor) -> Tensor:
    state.stream = run.fire("resid_pre", state, x)
    if state.layer.parallel:
        state.mlp_stream = state.stream
    return state.stream


def attn_in(run: Run, state: State, x: Tensor) -> Tensor:
    points = ("attn_stream_in", "q_input", "k_input", "v_input", "attn_norm_scale", "attn_norm_normalized")
    if any(run.tapped(point, state) for point in points):
        editable = any(run.writes(point, state) for point in points)
        _attention_branches(run, state, x.dtype, editable)
    return run.fire("attn_in", state, x)


def _attention_branches(run: Run, state: State, dtype: torch.dtype, editable: bool) -> None:
    """q, k and v read the stream through a norm of their own each: what is edited on one branch reaches only that one."""
    heads, norm = run.tree.heads, state.norm("attn_norm")
    shared, shared_dirty = None, False
    if run.tapped("attn_stream_in", state):
        shared, shared_dirty = run.fire_copy("attn_stream_in", state, _by_head(state.stream, heads.n))
    for part, n in (("q", heads.n), ("k", heads.n_kv), ("v", heads.n_kv)):
        x, dirty = (state.stream, False) if shared is None else (shared, shared_dirty)
        if run.tapped(f"{part}_input", state):
            x, dirty = run.fire_copy(f"{part}_input", state, _by_head(state.stream, n))
        if norm is not None:
            if not editable and part != "v":
                continue  # readers keep the last of the three calls, v's, and the first two are the same numbers
            x, dirty = _through_norm(run, state, "attn_norm", norm, x, dirty, dtype)
        if dirty:
            state.override[part] = _project(run, state, part, x)


def _through_norm(
    run: Run, state: State, role: str, norm: Norm, x: Tensor, dirty: bool, dtype: torch.dtype
) -> tuple[Tensor, bool]:
    """The norm's output for stream `x`, with taps on its scale and normalized value; and whether anything was edited."""
    divided, scale = norm.parts(x)
    scale, edited = run.fire_copy(f"{role}_scale", state, scale)
    normalized, edited_too = run.fire_copy(f"{role}_normalized", state, divided / scale)
    if dirty or edited or edited_too:
        return norm.finish(normalized, dtype), True
    return x, False


def _project(run: Run, state: State, part: str, x: Tensor) -> Tensor:
    """q, k or v `[b, p, heads, dh]` of an edited branch input `[b, p, D]`, or `[b, p, heads, D]` with one copy a head."""
    parts, heads = state.layer.parts, run.tree.heads
    if x.dim() == 4:
        name = {"q": "q", "k": "k", "v": "v"}[part]
        weight, bias = run.weights(name, state.index), run.weights(f"{name}_bias", state.index)
        return torch.einsum("bphd,hdk->bphk", x, weight.to(x)) + bias.to(x)
    if part in parts:
        return parts[part].forward(x).unflatten(-1, (-1, heads.d))
    return state.layer.layout.split(parts["qkv"].forward(x), heads)["qkv".index(part)]


def _projected(run: Run, state: State, part: str, point: str, value: Tensor) -> Tensor:
    """A projection `[b, p, heads, dh]` after any override, with its taps run."""
    value = state.override.pop(part, value)
    return run.fire(point, state, value)


def q_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _single_projection(run, state, "q", "q", y)


def k_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _single_projection(run, state, "k", "k", y)


def v_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _single_projection(run, state, "v", "value", y)


def _single_projection(run: Run, state: State, part: str, point: str, y: Tensor) -> Tensor:
    return _projected(run, state, part, point, y.unflatten(-1, (-1, run.tree.heads.d))).flatten(-2)


def qkv_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    edits = bool(state.override) or any(run.writes(point, state) for point in ("q", "k", "value"))
    parts = state.layer.layout.split(y, run.tree.heads)
    if edits:
        parts = tuple(part.clone() for part in parts)  # views of one tensor cannot be edited in place one by one
    new = [_projected(run, state, *names, part) for names, part in zip((("q", "q"), ("k", "k"), ("v", "value")), parts)]
    return state.layer.layout.join(*new) if edits else y


def q_norm_in(run: Run, state: State, x: Tensor) -> Tensor:
    return run.fire("q_norm_in", state, x)


def k_norm_in(run: Run, state: State, x: Tensor) -> Tensor:
    return run.fire("k_norm_in", state, x)


def q_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("q_norm_out", state, _norm_taps(run, state, "q_norm", state.norm("q_norm"), y, x))


def k_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("k_norm_out", state, _norm_taps(run, state, "k_norm", state.norm("k_norm"), y, x))


def _norm_taps(run: Run, state: State, role: str, norm: Norm, y: Tensor, x: Tensor) -> Tensor:
    if not (run.tapped(f"{role}_scale", state) or run.tapped(f"{role}_normalized", state)):
        return y
    new, edited = _through_norm(run, state, role, norm, x, False, y.dtype)
    return new if edited else y


def o_in(run: Run, state: State, x: Tensor) -> Tensor:
    z = run.fire("z", state, x.unflatten(-1, (run.tree.heads.n, -1)))
    if run.tapped("attn_result", state):
        result = torch.einsum("bphd,hdm->bphm", z, run.weights("o", state.index).to(z))
        result, edited = run.fire_copy("attn_result", state, result)
        if edited:
            state.override["attn"] = result.sum(2) + run.weights("o_bias", state.index).to(z)
    return z.flatten(-2)


def o_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return state.override.pop("attn", y)


def attn_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = run.fire("attn_out", state, y)
    return y if state.norm("attn_post_norm") else _attention_adds(run, state, y)


def attn_post_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return _attention_adds(run, state, _norm_taps(run, state, "attn_post_norm", state.norm("attn_post_norm"), y, x))


def _attention_adds(run: Run, state: State, y: Tensor) -> Tensor:
    """What attention adds to the stream. resid_mid is written here too: the block holds the sum in a local of its own."""
    y = run.fire("attn_out_post", state, y)
    if not run.tapped("resid_mid", state):
        return y
    mid = run.fire("resid_mid", state, state.stream + y)
    return mid - state.stream if run.writes("resid_mid", state) else y


def mlp_norm_in(run: Run, state: State, x: Tensor) -> Tensor:
    if not state.layer.parallel:
        state.mlp_stream = x
    return x


def mlp_in(run: Run, state: State, x: Tensor) -> Tensor:
    if any(run.tapped(point, state) for point in ("mlp_stream_in", "mlp_norm_scale", "mlp_norm_normalized")):
        stream, edited = run.fire_copy("mlp_stream_in", state, state.mlp_stream)
        new, edited = _through_norm(run, state, "mlp_norm", state.norm("mlp_norm"), stream, edited, x.dtype)
        x = new if edited else x
    return run.fire("mlp_in", state, x)


def gate_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("mlp_pre", state, y)


def up_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("mlp_pre_linear" if "gate" in state.layer.parts else "mlp_pre", state, y)


def gate_up_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    gate, up = (half.clone() if run.grad else half for half in y.chunk(2, -1))
    gate, up = run.fire("mlp_pre", state, gate), run.fire("mlp_pre_linear", state, up)
    edits = run.writes("mlp_pre", state) or run.writes("mlp_pre_linear", state)
    return torch.cat([gate, up], -1) if edits else y


def down_in(run: Run, state: State, x: Tensor) -> Tensor:
    return run.fire("mlp_act", state, x)


def mlp_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = run.fire("mlp_out", state, y)
    return y if state.norm("mlp_post_norm") else run.fire("mlp_out_post", state, y)


def mlp_post_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = _norm_taps(run, state, "mlp_post_norm", state.norm("mlp_post_norm"), y, x)
    return run.fire("mlp_out_post", state, y)


def block_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("resid_post", state, y)


def embed_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("embeddings", state, y)


def pos_embed_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    y = y.expand(run.batch_size, -1, -1)
    return run.fire("pos_embed", state, y.clone() if run.writes("pos_embed", state) else y)


def final_norm_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("final_norm", state, _norm_taps(run, state, "final_norm", run.tree.final_norm, y, x))


def lm_head_out(run: Run, state: State, y: Tensor, x: Tensor) -> Tensor:
    return run.fire("lm_head", state, y)


def _by_head(x: Tensor, n: int) -> Tensor:
    """`[b, p, D]` -> `[b, p, n, D]`, the same stream for every head."""
    return x[:, :, None].expand(-1, -1, n, -1)


HANDLERS: dict[str, Callable[..., Tensor]] = {
    place: globals()[place.replace(".", "_")] for place in dict.fromkeys(p for places in PLACES.values() for p in places)
}
assert PLACES.keys() == POINTS.keys()
