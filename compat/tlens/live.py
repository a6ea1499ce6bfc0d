"""Which places of a model's tree are live, as taps for one forward.

A hook point with anything on it is live, and so is whatever has taken a hook point's or a container's place. What is not live
costs nothing; what cannot be served is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from compat.tlens.hook_points import HookPoint
from engine.errors import BadReplacement, Refused
from engine.points import POINTS, Address
from engine.processed import Pass
from engine.taps import Tap
from mappers import tlens as mapper


@dataclass(frozen=True)
class Container:
    """A module that holds others: the points at which a forward enters and leaves it.

    The hook points outside it come before it on the way in and after it on the way out; `hooks_inside` says that those at
    the leaving point are its own.
    """

    path: str
    enters: str | None
    leaves: str
    layered: bool = True
    hooks_inside: bool = False


CONTAINERS = (
    Container("embed", "tokens", "embeddings", layered=False),
    Container("pos_embed", None, "pos_embed", layered=False),
    Container("", "resid_pre", "resid_post", hooks_inside=True),
    Container("attn", "attn_in", "attn_out"),
    Container("mlp", "mlp_in", "mlp_out"),
    Container("unembed", "final_norm", "lm_head", layered=False, hooks_inside=True),
)
NORM_PATHS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln_final")
_FOLDED = {"attn_in": "attn_norm_normalized", "mlp_in": "mlp_norm_normalized", "final_norm": "final_norm_normalized"}


def live_taps(
    model: Any, shown: Pass, *, leave_out: tuple[str, ...] = (), alone: nn.Module | None = None
) -> list[Tap]:
    """Taps for every live place of `model`, in the order in which a forward meets them at one address.

    leave_out: rows that stay silent. alone: a container that is called itself, so that its own torch hooks run there.
    """
    first, hooks, last = [], [], []
    for container, module, layer in _containers(model):
        if module is not alone and _is_live(container, module):
            entering, leaving = _container_taps(model, shown, container, module, layer)
            (first if container.hooks_inside else last).extend(entering)
            (last if container.hooks_inside else first).extend(leaving)
    for row, module, address in _hook_places(model):
        if row.name not in leave_out and not (type(module) is HookPoint and not module.is_live):
            hooks.append(_hook_tap(model, shown, module, address))
    before, after = shown.companions(tap.address for tap in first + hooks + last if not tap.reads)
    return before + first + hooks + last + after


def _hook_places(model: Any) -> Iterator[tuple[mapper.Row, nn.Module, Address]]:
    """Every place of a hook point: its row, the module that stands there now, and its address."""
    for owner_path, layered, rows in _rows_by_owner(model):
        for layer, root in enumerate(model.blocks) if layered else [(None, model)]:
            owner = _descend(root, owner_path)
            for attribute, row in rows if owner is not None else ():
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


def _hook_tap(model: Any, shown: Pass, module: nn.Module, address: Address) -> Tap:
    show, take = _view(shown, address)
    if isinstance(module, HookPoint) and module.reads_only:
        return Tap(address, lambda x: module(show(x)), reads=True)

    def call(x: Tensor) -> Tensor:
        seen = show(x)
        result = module(seen)
        return take(_checked(address, seen, result), x)

    return Tap(address, call)


def _view(shown: Pass, address: Address) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """(raw -> what TransformerLens shows, (that, raw) -> raw)."""
    if address.point.startswith(("q_norm_", "k_norm_")):  # TransformerLens runs these norms on one row a head
        return lambda x: x.flatten(0, -2), lambda seen, x: seen.reshape(x.shape)
    view = shown.view(address)
    if view is None:
        return lambda x: x, lambda seen, x: seen
    return view[0], lambda seen, x: view[1](seen)


def _checked(address: Address, seen: Tensor, result: object) -> Tensor:
    if isinstance(result, Tensor) and result.shape == seen.shape and result.dtype == seen.dtype:
        return result
    got = f"{list(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
    raise BadReplacement(
        f"a hook at {address} returned {got}, but the value there is {list(seen.shape)} {seen.dtype}; "
        "return a tensor of the same shape and dtype, or None for no change"
    )


def _containers(model: Any) -> Iterator[tuple[Container, nn.Module, int | None]]:
    for container in CONTAINERS:
        for layer, root in enumerate(model.blocks) if container.layered else [(None, model)]:
            module = _descend(root, container.path)
            if module is not None:
                yield container, module, layer
    for root in (*model.blocks, model):
        for path in NORM_PATHS:
            norm = root._modules.get(path) if hasattr(root, "_modules") else None
            if norm is not None and (type(norm) not in model.tree_types or _hooked(norm)):
                raise Refused(
                    f"{path} was replaced, or has a torch hook or another forward; norms run inside the engine. Use its "
                    "hook_scale and hook_normalized instead"
                )


def _is_live(container: Container, module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) not in _OWN_FORWARDS or _hooked(module)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in module.__dict__


def _container_taps(
    model: Any, shown: Pass, container: Container, module: nn.Module, layer: int | None
) -> tuple[list[Tap], list[Tap]]:
    """What stands in a container's place, or the torch hooks on it, as a tap where it is entered and one where it is left."""
    if module._backward_hooks or module._backward_pre_hooks:
        raise Refused(f"a backward hook on {container.path or 'a block'} itself; put it on a hook point instead")
    own = getattr(type(module), "forward", None) in _OWN_FORWARDS and "forward" not in module.__dict__
    enters = _FOLDED.get(container.enters, container.enters) if model.folded else container.enters
    kept: dict[str, Tensor] = {}

    def enter(x: Tensor, show: Callable, take: Callable) -> Tensor | None:
        kept["x"] = show(x)
        if own and module._forward_pre_hooks:
            kept["x"] = _run_pre_hooks(module, kept["x"])
            return take(kept["x"], x)
        return None

    def leave(x: Tensor, show: Callable, take: Callable) -> Tensor:
        seen = show(x)
        result = _run_hooks(module, kept.get("x"), seen) if own else _call(container, module, kept.get("x"), seen)
        return take(_checked(address, seen, result), x)

    address = Address(container.leaves, layer)
    leaving = Tap(address, lambda x: leave(x, *_view(shown, address)))
    if enters is None:
        return [], [leaving]
    start = Address(enters, layer if POINTS[enters].layered else None)
    return [Tap(start, lambda x: enter(x, *_view(shown, start)), reads=not (own and module._forward_pre_hooks))], [leaving]


def _call(container: Container, module: nn.Module, x: Tensor | None, out: Tensor) -> Tensor:
    """Calls what stands in a container's place the way TransformerLens calls it."""
    if container.path == "attn":
        return module(query_input=x, key_input=x, value_input=x, past_kv_cache_entry=None, attention_mask=None)
    if container.path == "":
        return module(x, past_kv_cache_entry=None, shortformer_pos_embed=None, attention_mask=None)
    return module(out if x is None else x)


def _run_pre_hooks(module: nn.Module, x: Tensor) -> Tensor:
    for key, hook in list(module._forward_pre_hooks.items()):
        if key in module._forward_pre_hooks_with_kwargs:
            result = hook(module, (x,), {})
            x = x if result is None else result[0][0]
        else:
            result = hook(module, (x,))
            x = x if result is None else result[0] if isinstance(result, tuple) else result
    return x


def _run_hooks(module: nn.Module, x: Tensor | None, out: Tensor) -> Tensor:
    for key, hook in list(module._forward_hooks.items()):
        extra = ({},) if key in module._forward_hooks_with_kwargs else ()
        result = hook(module, () if x is None else (x,), *extra, out)
        out = out if result is None else result
    return out


def _own_forwards() -> set[Callable]:
    from compat.tlens import components as c

    owners = (c.Embed, c.PosEmbed, c.TransformerBlock, c.AbstractAttention, c.MLP, c.GatedMLP, c.Unembed)
    return {owner.forward for owner in owners}


_OWN_FORWARDS = _own_forwards()
