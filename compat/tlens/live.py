"""Which places of a model's tree are live, as taps for one forward.

A hook point with anything on it is live, and so is whatever has taken a hook point's or a container's place. What is
not live costs nothing; what cannot be served is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compat.tlens import components as c
from compat.tlens.hook_points import HookPoint
from engine.errors import BadReplacement, Refused
from engine.points import POINTS, Address
from engine.processed import Pass
from engine.taps import Tap
from mappers import tlens as mapper


@dataclass(frozen=True)
class Container:
    """A module that holds others: the points at which a forward enters and leaves it.

    The hook points at these two come before it on the way in and after it on the way out, but for `inside`, its own
    first and last hook point.
    """

    path: str
    enters: str
    leaves: str
    layered: bool = True
    inside: tuple[str, str] | None = None


CONTAINERS = (
    Container("embed", "tokens", "embeddings", layered=False),
    Container("pos_embed", "tokens", "pos_embed", layered=False),
    Container("", "resid_pre", "resid_post", inside=("hook_resid_pre", "hook_resid_post")),
    Container("attn", "attn_in", "attn_out"),
    Container("mlp", "mlp_in", "mlp_out"),
    Container("unembed", "final_norm", "lm_head", layered=False, inside=("unembed.hook_in", "unembed.hook_out")),
)
_ORDER = {row.name: index for index, row in enumerate(mapper.ROWS)}
_FOLDED = {"attn_in": "attn_norm_normalized", "mlp_in": "mlp_norm_normalized", "final_norm": "final_norm_normalized"}


class CacheEntry:
    """Stands in for a layer's key/value cache entry; modules that use it are refused, the others never notice."""

    def __getattr__(self, name: str) -> Any:
        raise Refused(f"a module in the place of a block or its attention cannot use the key/value cache; {c.NO_CACHE}")


@dataclass(frozen=True)
class Forward:
    """What the modules of one forward are called with."""

    model: Any
    shown: Pass
    mask: Tensor | None = None  # [batch, pos]
    cached: bool = False


def live_taps(
    model: Any,
    shown: Pass,
    *,
    leave_out: tuple[str, ...] = (),
    alone: nn.Module | None = None,
    mask: Tensor | None = None,
    cached: bool = False,
) -> list[Tap]:
    """Taps for every live place of `model`, in the order in which a forward meets them at one address.

    leave_out: rows that stay silent. alone: a block or attention that is called itself; only what is in it is tapped.
    """
    forward = Forward(model, shown, mask, cached)
    roots = _roots(model, alone)
    ranked: list[tuple[float, Tap]] = []
    replaced = set()
    for container, module, layer in _containers(roots):
        if module is alone or (alone is not None and not container.path):
            continue
        own = _is_own(module, model, layer)
        if not own:
            replaced.add((container.path, layer))
        if not own or _hooked(module):
            ranked += _container_taps(forward, container, module, layer, own)
    _refuse_other_norms(model, roots, replaced)
    for row, module, address in _hook_places(model, roots, replaced):
        if row.name not in leave_out and not (type(module) is HookPoint and not module.is_live):
            name = row.name if address.layer is None else f"blocks.{address.layer}.{row.name}"
            ranked.append((_ORDER[row.name], _hook_tap(forward, name, module, address)))
    taps = [tap for _, tap in sorted(ranked, key=lambda entry: entry[0])]
    before, after = shown.companions(tap.address for tap in taps if not tap.reads)
    return before + taps + after


Roots = list[tuple[int | None, nn.Module]]


def _roots(model: Any, alone: nn.Module | None) -> Roots:
    """The modules that the paths of places start at: (layer, its block), and (None, model)."""
    if alone is None:
        if len(model.blocks) != model.engine.facts.n_layers:
            raise Refused(
                f"the model has {model.engine.facts.n_layers} layers, and model.blocks holds {len(model.blocks)}; "
                "use stop_at_layer, or load with first_n_layers"
            )
        return [*enumerate(model.blocks), (None, model)]
    is_block = hasattr(alone, "attn")
    return [(alone.layer_index, alone if is_block else nn.ModuleDict({"attn": alone}))]


def _hook_places(
    model: Any, roots: Roots, replaced: set[tuple[str, int | None]]
) -> Iterator[tuple[mapper.Row, nn.Module, Address]]:
    """Every place of a hook point: its row, the module that stands there now, and its address.

    What a replaced container holds is its own affair, whatever its names.
    """
    for owner_path, layered, rows in _rows_by_owner(model):
        for layer, root in roots:
            owner = _descend(root, owner_path) if layered == (layer is not None) else None
            if owner is None or ("", layer) in replaced or (owner_path.split(".")[0], layer) in replaced:
                continue
            for attribute, row in rows:
                module = owner._modules.get(attribute)
                if module is not None:
                    yield row, module, model.address_of(row, layer)


def _rows_by_owner(model: Any) -> list[tuple[str, bool, list[tuple[str, mapper.Row]]]]:
    """The mapper's rows that can fire, grouped by the module that owns the hook point."""
    groups: dict[tuple[str, bool], list[tuple[str, mapper.Row]]] = {}
    for row in mapper.ROWS:
        if row.has(model.engine.facts) and (row.flag is None or getattr(model.cfg, row.flag)):
            owner, _, attribute = row.name.rpartition(".")
            groups.setdefault((owner, POINTS[row.point].layered), []).append((attribute, row))
    return [(owner, layered, rows) for (owner, layered), rows in groups.items()]


def _descend(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split(".") if path else ():
        module = getattr(module, "_modules", {}).get(part)
        if module is None:
            return None
    return module


def _hook_tap(forward: Forward, name: str, module: nn.Module, address: Address) -> Tap:
    show, take = _view(forward, address)
    if isinstance(module, HookPoint) and module.reads_only:
        return Tap(address, lambda x: module(show(x)), reads=True)

    def call(x: Tensor) -> Tensor:
        seen = show(x)
        result = module(seen)
        return take(_checked(name, seen, result), x)

    return Tap(address, call)


def _view(forward: Forward, address: Address) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """(raw -> what TransformerLens shows, (that, raw) -> raw)."""
    if address.point.startswith(("q_norm_", "k_norm_")):  # TransformerLens runs these norms on one row a head, or on all
        joint = forward.model.engine.facts.qk_norm_joint
        return lambda x: x.flatten(-2) if joint else x.flatten(0, -2), lambda seen, x: seen.reshape(x.shape)
    if address.point in ("router_probs", "expert_indices"):  # TransformerLens routes one row a token
        return lambda x: x.flatten(0, 1), lambda seen, x: seen.reshape(x.shape)
    view = forward.shown.view(address)
    if view is None:
        return lambda x: x, lambda seen, x: seen
    return view[0], lambda seen, x: view[1](seen)


def _checked(name: str, seen: Tensor, result: object) -> Tensor:
    if isinstance(result, Tensor) and result.shape == seen.shape and result.dtype == seen.dtype:
        return result
    got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
    raise BadReplacement(
        f"a hook at {name!r} returned {got}, but the value there is {list(seen.shape)} {seen.dtype}; "
        "return a tensor of the same shape and dtype, or None for no change"
    )


def _containers(roots: Roots) -> Iterator[tuple[Container, nn.Module, int | None]]:
    for container in CONTAINERS:
        for layer, root in roots:
            module = _descend(root, container.path) if container.layered == (layer is not None) else None
            if module is not None:
                yield container, module, layer


def _is_own(module: nn.Module, model: Any, layer: int | None) -> bool:
    """Whether the module is the one that the engine runs here: not another class, layer, model or forward."""
    return (
        getattr(type(module), "forward", None) in _OWN_FORWARDS
        and "forward" not in module.__dict__
        and module.parameters_of_model is model.weights_shown
        and module.layer_index == layer
    )


def _hooked(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _refuse_other_norms(model: Any, roots: Roots, replaced: set[tuple[str, int | None]]) -> None:
    norms = mapper.norms(model.engine.facts)
    for layer, root in roots:
        for path, name in norms.items() if ("", layer) not in replaced else ():
            norm = _descend(root, path) if (path.split(".")[0], layer) not in replaced else None
            if norm is not None and (not _is_own(norm, model, layer) or norm.norm_name != name or _hooked(norm)):
                raise Refused(
                    f"{path} was replaced, or has a torch hook or another forward; norms run inside the engine. Use "
                    "its hook_scale and hook_normalized instead"
                )


def _container_taps(
    forward: Forward, container: Container, module: nn.Module, layer: int | None, own: bool
) -> list[tuple[float, Tap]]:
    """What stands in a container's place, or the torch hooks on it: a tap where it is entered, one where it is left.

    Each with its rank among the hook points.
    """
    _refuse_unserved(forward, container, module, own)
    enters = _FOLDED.get(container.enters, container.enters) if forward.model.folded else container.enters
    start, end = Address(enters, layer if POINTS[enters].layered else None), Address(container.leaves, layer)
    path = f"blocks.{layer}.{container.path}" if container.layered else container.path
    name = path.rstrip(".")
    edits_input = own and bool(module._forward_pre_hooks)
    kept: dict[str, Tensor] = {}

    def enter(x: Tensor) -> Tensor | None:
        show, take = _view(forward, start)
        kept["x"] = show(x)
        if not edits_input:
            return None
        kept["x"] = _run_pre_hooks(module, *_arguments(container, kept["x"], forward))
        return take(kept["x"], x)

    def leave(x: Tensor) -> Tensor:
        show, take = _view(forward, end)
        seen = show(x)
        args, kwargs = _arguments(container, kept["x"], forward)
        result = _run_hooks(module, args, kwargs, seen) if own else module(*args, **kwargs)
        return take(_checked(name, seen, result), x)

    ranks = (math.inf, -math.inf)
    if container.inside is not None:
        ranks = (_ORDER[container.inside[0]] - 0.5, _ORDER[container.inside[1]] + 0.5)
    return list(zip(ranks, (Tap(start, enter, reads=not edits_input), Tap(end, leave))))


def _refuse_unserved(forward: Forward, container: Container, module: nn.Module, own: bool) -> None:
    name, cfg = container.path or "a block", forward.model.cfg
    if module._backward_hooks or module._backward_pre_hooks:
        raise Refused(f"a backward hook on {name} itself; put it on a hook point instead")
    if module._forward_pre_hooks and own and container.path in ("embed", "pos_embed", "attn"):
        raise Refused(f"a torch pre-hook on {name} itself; put a hook on the points before it instead")
    if container.path == "attn" and not own and (cfg.use_split_qkv_input or cfg.use_attn_in):
        raise Refused("a replaced attention is given one input; turn use_split_qkv_input and use_attn_in off")
    if container.path == "pos_embed" and not own and forward.cached:
        raise Refused(
            "a replaced pos_embed is not served with a key/value cache; generate with use_past_kv_cache=False"
        )


def _arguments(container: Container, x: Tensor, forward: Forward) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) with which TransformerLens calls what stands in a container's place."""
    layer = {"past_kv_cache_entry": CacheEntry() if forward.cached else None, "attention_mask": forward.mask}
    if container.path == "attn":
        return (), {"query_input": x, "key_input": x, "value_input": x} | layer
    if container.path == "":
        return (x,), {"shortformer_pos_embed": None} | layer
    return ((x, 0, forward.mask) if container.path == "pos_embed" else (x,)), {}


def _run_pre_hooks(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            result = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if result is None else result
        else:
            result = hook(module, args)
            args = args if result is None else result if isinstance(result, tuple) else (result,)
    return args[0]


def _run_hooks(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Tensor:
    for key, hook in list(module._forward_hooks.items()):
        extra = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        result = hook(module, args, *extra, out)
        out = out if result is None else result
    return out


_OWN_FORWARDS = {
    owner.forward
    for owner in (
        *(c.Embed, c.PosEmbed, c.TransformerBlock, c.AbstractAttention, c.MLP, c.GatedMLP, c.MixtureOfExperts),
        *(c.Unembed, c.Norm),
    )
}
