"""`HookedRootModule`: a module that knows its hook points by name, and runs with hooks or with a cache.

It needs no engine: a user's own `nn.Module` with `HookPoint`s in it subclasses this and calls `setup()`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, ValuesView
from contextlib import contextmanager
from typing import Any, Optional, Union

from torch import Tensor, nn

from compat.tlens.errors import require
from compat.tlens.hook_points import (
    DeviceType,
    Direction,
    Directions,
    HookFunction,
    HookIntrospectionMixin,
    HookPoint,
    NamesFilter,
    name_matcher,
)
from compat.tlens.utils import Slice, SliceInput, warn_if_mps
from engine.errors import CompatError, UnknownName

HookSpec = tuple[Union[str, Callable[[str], bool]], Callable]
PER_HEAD_NAMES = ("hook_q", "hook_k", "hook_v", "hook_z", "hook_result")  # [..., pos, head, width]


class NotAHookPoint(CompatError, AssertionError, TypeError):
    """A hook was asked for on a module that takes none."""


class HookedRootModule(HookIntrospectionMixin, nn.Module):
    """The root of a tree with hook points in it.

    `mod_dict` holds every module below by its dotted name, `hook_dict` the hook points among them.
    """

    name: Optional[str]
    mod_dict: dict[str, nn.Module]
    hook_dict: dict[str, HookPoint]

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.is_caching = False
        self.context_level = 0

    def setup(self) -> None:
        """Name every module below. Call it once all of them are there, and again after one was replaced."""
        self.mod_dict = {name: module for name, module in self.named_modules() if name}
        self.hook_dict = {name: module for name, module in self.mod_dict.items() if isinstance(module, HookPoint)}
        for name, module in self.mod_dict.items():
            module.name = name

    def hook_points(self) -> ValuesView[HookPoint]:
        return self.hook_dict.values()

    def remove_all_hook_fns(
        self, direction: Directions = "both", including_permanent: bool = False, level: Optional[int] = None
    ) -> None:
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def clear_contexts(self) -> None:
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Directions = "both",
        including_permanent: bool = False,
        level: Optional[int] = None,
    ) -> None:
        """Take hooks off every point; with `level` only those added at that depth of `hooks()` contexts."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level=level)
        self.is_caching = False

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Called before `add_hook` adds; a subclass raises here to refuse. Contexts do not ask."""

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: Optional[int] = None,
        prepend: bool = False,
    ) -> None:
        self.check_hooks_to_add(
            hook_point, hook_point_name, hook, dir=dir, is_permanent=is_permanent, prepend=prepend
        )
        hook_point.add_hook(hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend)

    def add_hook(
        self,
        name: Union[str, Callable[[str], bool]],
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: Optional[int] = None,
        prepend: bool = False,
    ) -> None:
        """Add a hook at a name, or at every name a function accepts. It stays until `reset_hooks`.

        UnknownName (a KeyError) for a name nothing has; NotAHookPoint (an AssertionError) for another module's.
        """
        if isinstance(name, str):
            point = self._module_named(name)
            if not isinstance(point, HookPoint):
                raise NotAHookPoint(f"{name!r} is a {type(point).__name__}, and hooks are added to hook points only")
            chosen = {name: point}
        else:
            chosen = {each: point for each, point in self.hook_dict.items() if name(each)}
        for each, point in chosen.items():
            self.check_and_add_hook(
                point, each, hook, dir=dir, is_permanent=is_permanent, level=level, prepend=prepend
            )

    def add_perma_hook(
        self, name: Union[str, Callable[[str], bool]], hook: HookFunction, dir: Direction = "fwd"
    ) -> None:
        self.add_hook(name, hook, dir=dir, is_permanent=True)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Iterable[HookSpec] = [],
        bwd_hooks: Iterable[HookSpec] = [],
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[HookedRootModule]:
        """Hooks for the length of a with-block, as `(name or function on names, hook)` pairs.

        Contexts nest: each takes off what was added at its own depth, also after an exception.
        """
        self.context_level += 1
        try:
            for dir, specs in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, hook in specs:
                    self._enable_hook(name, hook, dir)
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, including_permanent=False, level=self.context_level)
            self.context_level -= 1

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: list[HookSpec] = [],
        bwd_hooks: list[HookSpec] = [],
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward under `hooks()`. For backward hooks keep them with `reset_hooks_end=False`, or use `hooks()`."""
        if len(bwd_hooks) > 0 and reset_hooks_end:
            logging.warning(
                "run_with_hooks takes its hooks off when the forward ends, so these bwd_hooks will never run; "
                "pass reset_hooks_end=False or call backward inside `with model.hooks(...)`"
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts) as hooked_model:
            return hooked_model.forward(*model_args, **model_kwargs)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Optional[Union[Slice, SliceInput]] = None,
        **model_kwargs: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """One forward; returns its output and the values of the hook points, detached, in the order they fired.

        `incl_bwd` also calls `backward()` on the output, which must be a scalar, and keeps gradients under
        `name + "_grad"`. An int `pos_slice` keeps a position axis of length 1.
        """
        cache, fwd_hooks, bwd_hooks = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            model_out = self(*model_args, **model_kwargs)
            if incl_bwd:
                model_out.backward()
        return model_out, cache

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        cache: Optional[dict] = None,
        pos_slice: Optional[Union[Slice, SliceInput]] = None,
    ) -> tuple[dict, list[HookSpec], list[HookSpec]]:
        """The dict that a run will fill, and the forward and backward hooks that fill it. Adds none of them."""
        cache, names = self._prepare_caching(names_filter, device, cache)
        options = (cache, device, remove_batch_dim, Slice.unwrap(pos_slice))
        fwd_hooks = [(name, _caching_hook(*options)) for name in names]
        bwd_hooks = [(name, _caching_hook(*options, suffix="_grad")) for name in names] if incl_bwd else []
        return cache, fwd_hooks, bwd_hooks

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
        cache: Optional[dict] = None,
    ) -> dict:
        """Add caching hooks that stay until `reset_hooks`, and return the dict that every run from here fills."""
        cache, names = self._prepare_caching(names_filter, device, cache)
        options = (cache, device, remove_batch_dim, Slice())
        for name in names:
            self.hook_dict[name].add_hook(_caching_hook(*options), "fwd")
            if incl_bwd:
                self.hook_dict[name].add_hook(_caching_hook(*options, suffix="_grad"), "bwd")
        return cache

    def cache_all(
        self,
        cache: Optional[dict],
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """`add_caching_hooks` at every point."""
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: Optional[dict],
        names: Callable[[str], bool],
        incl_bwd: bool = False,
        device: DeviceType = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """`add_caching_hooks` at the points whose name `names` accepts."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def _module_named(self, name: str) -> nn.Module:
        if name not in self.mod_dict:
            raise UnknownName(name, self.hook_dict, what="hook name", hint=self._why_unknown(name))
        return self.mod_dict[name]

    def _why_unknown(self, name: str) -> str:
        """A sentence for the error that a name without a hook point gets."""
        return "hook_dict lists every name"

    def _enable_hook(self, name: Union[str, Callable[[str], bool]], hook: Callable, dir: Direction) -> None:
        """Add one hook of a `hooks()` context. A module that replaced a hook point serves if it has an add_hook."""
        if isinstance(name, str):
            points = [self._module_named(name)]
        else:
            points = [point for each, point in self.hook_dict.items() if name(each)]
        for point in points:
            if not hasattr(point, "add_hook"):
                raise NotAHookPoint(f"{name!r} is a {type(point).__name__}, which has no add_hook")
            point.add_hook(hook, dir=dir, level=self.context_level)

    def _prepare_caching(
        self, names_filter: NamesFilter, device: DeviceType, cache: Optional[dict]
    ) -> tuple[dict, list[str]]:
        require(
            names_filter is None or isinstance(names_filter, (str, list)) or callable(names_filter),
            f"names_filter must be a name, a list of names or a function on names, not {names_filter!r}",
        )
        if device is not None:
            warn_if_mps(device)
        self.is_caching = True
        matches = name_matcher(names_filter)
        return {} if cache is None else cache, [name for name in self.hook_dict if matches(name)]


def _caching_hook(
    cache: dict, device: DeviceType, remove_batch_dim: bool, pos_slice: Slice, suffix: str = ""
) -> Callable[..., None]:
    """A hook that keeps what it sees; the tensor kept shares memory with the one that flows on, unless moved."""

    def save(tensor: Tensor, hook: HookPoint) -> None:
        value = tensor.detach().to(device)
        if remove_batch_dim:
            value = value[0]
        pos_dim = -3 if hook.name.endswith(PER_HEAD_NAMES) else -2
        if value.dim() >= -pos_dim:
            value = pos_slice.apply(value, dim=pos_dim)
        cache[hook.name + suffix] = value

    save.reads_only = True
    return save
