"""`HookPoint`: the identity module that hooks live on, and what describes the hooks on it.

Hooks are ordinary torch hooks underneath, so lens hooks and hooks a user registers with torch run in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Optional, Protocol, Union, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.errors import BadInput

Direction = Literal["fwd", "bwd"]
Directions = Literal["fwd", "bwd", "both"]
NamesFilter = Optional[Union[Callable[[str], bool], Sequence[str], str]]
DeviceType = Optional[torch.device]


@runtime_checkable
class HookFunction(Protocol):
    """`fn(tensor, hook=point)`: returns what replaces the tensor, or None to leave it."""

    def __call__(self, tensor: Tensor, *, hook: HookPoint) -> Any | None: ...


@dataclass
class LensHandle:
    """One hook on a point: torch's handle, what removes it, and the callable the user gave."""

    hook: RemovableHandle
    is_permanent: bool = False
    context_level: Optional[int] = None
    user_hook: Optional[Callable] = None


class _Alias:
    """A hook point as a hook sees it that was added under another name."""

    def __init__(self, name: str, target: HookPoint) -> None:
        self.name = name
        self._target = target

    @property
    def ctx(self) -> dict:
        return self._target.ctx

    @property
    def hook_conversion(self) -> Any | None:
        return self._target.hook_conversion

    def layer(self) -> int:
        return layer_in_name(self.name)


class HookPoint(nn.Module):
    """Identity on a tensor of any shape; whatever is hooked on it reads or replaces that tensor or its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks: list[LensHandle] = []
        self.bwd_hooks: list[LensHandle] = []
        self.ctx: dict = {}
        self.name: Optional[str] = None  # set by HookedRootModule.setup()
        self.hook_conversion: Any | None = None

    def __repr__(self) -> str:
        parts = [] if self.name is None else [f"name={self.name!r}"]
        parts += [f"{len(hooks)} {dir}" for dir, hooks in (("fwd", self.fwd_hooks), ("bwd", self.bwd_hooks)) if hooks]
        return f"HookPoint({', '.join(parts)})"

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_hook(
        self,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: Optional[int] = None,
        prepend: bool = False,
        alias_names: Optional[list[str]] = None,
    ) -> None:
        """Call `hook(tensor, hook=self)` on each forward value, or on each gradient with `dir="bwd"`.

        A result that is not None replaces the value. With `alias_names` the hook runs once a name, each run seeing the
        last one's result, and its `hook.name` is that name.
        """
        _check_direction(dir, ("fwd", "bwd"))
        seen_as = [self] if alias_names is None else [_Alias(name, self) for name in alias_names]

        def run(value: Tensor) -> Any | None:
            conversion, result = self.hook_conversion, None
            if conversion is not None:
                value = conversion.convert(value)
            for point in seen_as:
                answer = hook(value, hook=point)
                if answer is not None:
                    result = value = answer
            return result if result is None or conversion is None else conversion.revert(result)

        def on_forward(module: nn.Module, inputs: Any, output: Tensor) -> Any | None:
            return run(output)

        def on_backward(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> tuple | None:
            result = run(grad_output[0])
            # torch takes one gradient an input, as a tuple
            return result if result is None or _is_single(result) else (result,)

        if dir == "fwd":
            torch_hook, register, handles = on_forward, self.register_forward_hook, self.fwd_hooks
        else:
            torch_hook, register, handles = on_backward, self.register_full_backward_hook, self.bwd_hooks
        torch_hook.__name__ = _shown(hook)
        handle = LensHandle(register(torch_hook, prepend=prepend), is_permanent, level, hook)
        handles.insert(0 if prepend else len(handles), handle)

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> None:
        """Add a hook that only `remove_hooks(including_permanent=True)` takes off."""
        self.add_hook(hook, dir=dir, is_permanent=True)

    def has_hooks(
        self, dir: Directions = "both", including_permanent: bool = True, level: Optional[int] = None
    ) -> bool:
        """Whether a hook of that direction, permanence and context level is on this point."""
        _check_direction(dir, ("fwd", "bwd", "both"))
        handles = self.fwd_hooks * (dir != "bwd") + self.bwd_hooks * (dir != "fwd")
        return any(
            (including_permanent or not handle.is_permanent) and (level is None or handle.context_level == level)
            for handle in handles
        )

    def remove_hooks(
        self, dir: Directions = "fwd", including_permanent: bool = False, level: Optional[int] = None
    ) -> None:
        """Take hooks off. `including_permanent` takes every hook of the direction, whatever its level."""
        _check_direction(dir, ("fwd", "bwd", "both"))

        def take_off(handles: list[LensHandle]) -> list[LensHandle]:
            kept = []
            for handle in handles:
                matches = not handle.is_permanent and (level is None or handle.context_level == level)
                if including_permanent or matches:
                    handle.hook.remove()
                else:
                    kept.append(handle)
            return kept

        if dir != "bwd" and self.fwd_hooks:
            self.fwd_hooks = take_off(self.fwd_hooks)
        if dir != "fwd" and self.bwd_hooks:
            self.bwd_hooks = take_off(self.bwd_hooks)

    def clear_context(self) -> None:
        """Give the point a new, empty `ctx`."""
        if self.ctx:
            self.ctx = {}

    def enable_reshape(self, hook_conversion: Any | None = None) -> None:
        """Show hooks `hook_conversion.convert(value)` and put `hook_conversion.revert(result)` back."""
        self.hook_conversion = hook_conversion

    def layer(self) -> int:
        """The layer in a name `blocks.{layer}. ...`. ValueError where the point has no name yet."""
        return layer_in_name(self.name)

    @property
    def is_live(self) -> bool:
        """Whether calling this point can do anything: a lens hook, a plain torch hook, or another `forward`."""
        return bool(self._forward_hooks) or self._acts_beyond_forward_hooks()

    @property
    def reads_only(self) -> bool:
        """Whether everything on this point is a forward caching hook, which leaves the value as it is."""
        if self.hook_conversion is not None or self._acts_beyond_forward_hooks():
            return False
        caching = {handle.hook.id for handle in self.fwd_hooks if getattr(handle.user_hook, "reads_only", False)}
        return caching.issuperset(self._forward_hooks)

    def _acts_beyond_forward_hooks(self) -> bool:
        hooked = self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return bool(hooked) or "forward" in self.__dict__ or type(self).forward is not HookPoint.forward


class HookIntrospectionMixin:
    """`list_hooks` for anything that has a `hook_dict`."""

    def list_hooks(
        self, name_filter: NamesFilter = None, dir: Directions = "both", including_permanent: bool = True
    ) -> dict[str, list[LensHandle]]:
        """The handles on each hook point that has any, by name, forward ones first."""
        matches = name_matcher(name_filter)
        found = {}
        for name, point in self.hook_dict.items():
            if matches(name):
                handles = point.fwd_hooks * (dir in ("fwd", "both")) + point.bwd_hooks * (dir in ("bwd", "both"))
                found[name] = [handle for handle in handles if including_permanent or not handle.is_permanent]
        return {name: handles for name, handles in found.items() if handles}


def name_matcher(names_filter: NamesFilter) -> Callable[[str], bool]:
    """A filter as a predicate on names: None takes all, a string that name, a list those in it."""
    if names_filter is None:
        return lambda name: True
    if callable(names_filter):
        return names_filter
    wanted = [names_filter] if isinstance(names_filter, str) else list(names_filter)
    return lambda name: name in wanted


def layer_in_name(name: str | None) -> int:
    """The number after the first dot of a hook name."""
    if name is None:
        raise BadInput("this hook point has no name yet; its root module's setup() names it")
    return int(name.split(".")[1])


def _check_direction(dir: str, known: tuple[str, ...]) -> None:
    if dir not in known:
        raise BadInput(f"invalid direction {dir!r}: one of {', '.join(known)}")


def _is_single(result: Any) -> bool:
    return isinstance(result, tuple) and len(result) == 1


def _shown(hook: Callable) -> str:
    # the repr of a partial prints its arguments, and those may be large tensors
    return f"partial({hook.func!r},...)" if isinstance(hook, partial) else repr(hook)


def __getattr__(name: str) -> Any:
    # code up to 2.x imports HookedRootModule from here; its own module imports this one
    if name == "HookedRootModule":
        from compat.tlens.HookedRootModule import HookedRootModule

        return HookedRootModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
