"""One program on TransformerLens' hook points and on ours, over the same module of a user's own: equal results.

A program gets a `Toy` built on either library and returns what it saw. Everything is compared bit for bit; where the
real library raises, ours raises that class or a subclass of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint as RealHookPoint
from transformer_lens.HookedRootModule import HookedRootModule as RealHookedRootModule

from compat.tlens.hook_points import HookPoint
from compat.tlens.HookedRootModule import HookedRootModule

LIBRARIES = {
    "real": SimpleNamespace(HookPoint=RealHookPoint, HookedRootModule=RealHookedRootModule),
    "ours": SimpleNamespace(HookPoint=HookPoint, HookedRootModule=HookedRootModule),
}


def toy_on(lib: Any) -> Any:
    """[batch, pos, 6] -> scalar, with a residual stream, heads and a point used three times in a forward."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(6, 6)
            self.hook_q, self.hook_pattern, self.hook_z = lib.HookPoint(), lib.HookPoint(), lib.HookPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.hook_q(self.project(x).unflatten(-1, (2, 3)))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, q)
            pattern = self.hook_pattern(scores.softmax(-1))
            return self.hook_z(torch.einsum("bhqk,bkhd->bqhd", pattern, q)).flatten(-2)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()
            self.hook_scale, self.hook_out = lib.HookPoint(), lib.HookPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x / self.hook_scale(x.norm(dim=-1, keepdim=True))
            return self.hook_out(x + self.attn(x))

    class Toy(lib.HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.hook_embed, self.hook_unused = lib.HookPoint(), lib.HookPoint()
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.readout = nn.Linear(6, 1)
            self.setup()

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            x = self.hook_embed(x * scale)
            for block in self.blocks:
                x = block(x)
            return self.readout(x).sum()

    return Toy()


def example(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return error


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), (found, expected)
    elif isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.requires_grad == expected.requires_grad
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for mine, theirs in zip(found, expected):
            assert_same(mine, theirs)
    else:
        assert found == expected


# ---- programs


def names_and_modules(toy: Any, lib: Any) -> Any:
    shared = lib.HookPoint()
    toy.blocks[0].attn.hook_z = toy.blocks[1].attn.hook_z = shared
    toy.blocks[1].hook_out = nn.Identity()
    toy.setup()
    return (
        list(toy.mod_dict),
        list(toy.hook_dict),
        [point.name for point in toy.hook_points()],
        [module.name for module in toy.mod_dict.values()],
        [repr(toy.hook_embed), toy.blocks[1].attn.hook_q.layer(), repr(lib.HookPoint())],
        [outcome(toy.hook_embed.layer), outcome(lib.HookPoint().layer)],
    )


def firing_order(toy: Any, lib: Any) -> Any:
    log: list[Any] = []

    def seen(tensor: torch.Tensor, hook: Any, tag: str) -> None:
        log.append((tag, hook.name, tensor.clone().detach()))

    point = toy.blocks[0].attn.hook_z
    point.register_forward_hook(lambda module, args, out: seen(out, module, "torch"))
    for tag, prepend in (("a", False), ("b", True), ("c", False), ("d", True)):
        toy.add_hook("blocks.0.attn.hook_z", partial(seen, tag=tag), prepend=prepend)
        toy.add_hook(lambda name: "hook_scale" in name, partial(seen, tag="grad " + tag), dir="bwd", prepend=prepend)
    toy.add_hook(lambda name: True, partial(seen, tag="all"))
    toy.add_hook(lambda name: True, partial(seen, tag="grad all"), dir="bwd")
    toy(example()).backward()
    return log, [handle.user_hook.keywords["tag"] for handle in point.fwd_hooks], repr(point)


def edits(toy: Any, lib: Any) -> Any:
    def doubled(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return 2 * tensor

    def pinned_in_place(tensor: torch.Tensor, hook: Any) -> None:
        tensor[:, 1] = 0.5

    results = {}
    for name in toy.hook_dict:
        for edit in (doubled, pinned_in_place):
            with torch.no_grad():
                results[name, edit.__name__] = toy.run_with_hooks(example(), scale=0.5, fwd_hooks=[(name, edit)])
        x = example()
        toy.run_with_hooks(x, fwd_hooks=[(name, doubled), (name, doubled)]).backward()
        results[name, "gradient"] = x.grad
    return results


def backward_edits(toy: Any, lib: Any) -> Any:
    def returning(wrap: Callable[[torch.Tensor], Any]) -> Callable:
        return lambda grad, hook: wrap(3 * grad)

    wraps: list[Callable[[torch.Tensor], Any]] = [
        lambda grad: grad,
        lambda grad: (grad,),
        lambda grad: None,
        lambda grad: [grad],
        lambda grad: (grad, grad),
        lambda grad: grad[..., :2],
        lambda grad: "a string",
    ]
    results = []
    for name in ("hook_embed", "blocks.0.hook_scale", "blocks.1.attn.hook_pattern"):
        for wrap in wraps:
            x = example()

            def gradient() -> torch.Tensor:
                with toy.hooks(bwd_hooks=[(name, returning(wrap)), (name, lambda grad, hook: None)]):
                    toy(x).backward()
                return x.grad

            results.append(outcome(gradient))
            toy.zero_grad()
    return results, toy.list_hooks()


def wrong_returns(toy: Any, lib: Any) -> Any:
    answers = ("a string", 3, example()[:1, :2, :5])
    return [outcome(lambda: toy.run_with_hooks(example(), fwd_hooks=[("hook_embed", lambda *_, **__: answer)]))
            for answer in answers]  # fmt: skip


def context_levels(toy: Any, lib: Any) -> Any:
    log: list[Any] = []

    def count() -> None:
        log.append((toy.context_level, [(h.is_permanent, h.context_level) for h in toy.hook_embed.fwd_hooks]))

    def nothing(tensor: torch.Tensor, hook: Any) -> None:
        hook.ctx["seen"] = hook.ctx.get("seen", 0) + 1

    pair = ("hook_embed", nothing)
    toy.add_hook(*pair)
    toy.add_perma_hook(*pair)
    toy.add_hook(*pair, level=2)
    toy.hook_embed.add_perma_hook(nothing, dir="bwd")
    with toy.hooks(fwd_hooks=[pair]) as same:
        log.append(same is toy)
        count()
        with toy.hooks(fwd_hooks=[pair, (lambda name: name == "hook_embed", nothing)], clear_contexts=True):
            toy(example())
            count()
            log.append(dict(toy.hook_embed.ctx))
        log.append(dict(toy.hook_embed.ctx))
        count()
        toy.run_with_hooks(example(), fwd_hooks=[pair], reset_hooks_end=False)
        count()
        toy.run_with_hooks(example(), fwd_hooks=[pair])
        count()
        with pytest.raises(ZeroDivisionError), toy.hooks(fwd_hooks=[pair]):
            raise ZeroDivisionError
        count()
        toy.hook_embed.add_hook(nothing, is_permanent=True, level=1)
    count()
    for arguments in (
        {"clear_contexts": False, "direction": "bwd"},
        {"level": 5},
        {"level": 1},
        {},
        {"direction": "fwd", "including_permanent": True, "level": 7},
        {"including_permanent": True},
    ):
        toy.reset_hooks(**arguments)
        count()
        log.append((dict(toy.hook_embed.ctx), len(toy.hook_embed.bwd_hooks)))
    return log


def has_and_list_hooks(toy: Any, lib: Any) -> Any:
    def nothing(tensor: torch.Tensor, hook: Any) -> None: ...

    point = toy.hook_embed
    point.add_hook(nothing, level=2)
    point.add_perma_hook(nothing, dir="bwd")
    toy.blocks[0].hook_out.add_hook(nothing, dir="bwd")
    has = [
        point.has_hooks(dir, permanent, level)
        for dir in ("fwd", "bwd", "both")
        for permanent in (True, False)
        for level in (None, 1, 2)
    ]
    listed = [
        {name: len(handles) for name, handles in toy.list_hooks(names, dir, permanent).items()}
        for names in (None, "hook_embed", ["hook_embed", "nobody"], ("blocks.0.hook_out",), lambda name: "out" in name)
        for dir in ("fwd", "bwd", "both")
        for permanent in (True, False)
    ]
    return has, listed, outcome(lambda: point.has_hooks("sideways"))


def caches(toy: Any, lib: Any) -> Any:
    results = []
    for arguments in (
        {},
        {"names_filter": "blocks.0.attn.hook_z"},
        {"names_filter": ["blocks.0.attn.hook_z", "hook_embed", "nobody"]},
        {"names_filter": lambda name: name.endswith("hook_out")},
        {"names_filter": "nobody"},
        {"incl_bwd": True},
        {"incl_bwd": True, "names_filter": lambda name: "scale" in name, "scale": 3.0},
        {"device": "cpu"},
        {"device": torch.device("meta")},
        {"pos_slice": -1},
        {"pos_slice": (1, 3), "incl_bwd": True},
        {"pos_slice": [0, 2, 2]},
        {"names_filter": ("hook_embed",)},
    ):
        found = outcome(lambda: toy.run_with_cache(example(), **arguments))
        if arguments.get("device") == torch.device("meta"):
            found = {name: (value.device.type, value.shape) for name, value in found[1].items()}
        results += [found, toy.is_caching, toy.list_hooks()]
        toy.zero_grad()
    for arguments in ({}, {"incl_bwd": True}, {"pos_slice": 2}):
        results.append(toy.run_with_cache(example(1), remove_batch_dim=True, **arguments))
    return results


def cache_left_on(toy: Any, lib: Any) -> Any:
    x = example()
    _, cache = toy.run_with_cache(x, reset_hooks_end=False, names_filter="hook_embed")
    still = [toy.is_caching, len(toy.hook_embed.fwd_hooks)]
    toy(2 * x)
    first = dict(cache)
    toy.reset_hooks()
    toy(3 * x)
    return first, cache, still, toy.is_caching


def caching_hooks_by_hand(toy: Any, lib: Any) -> Any:
    given: dict = {"before": torch.zeros(1)}
    returned = toy.add_caching_hooks(lambda name: "hook_out" in name, incl_bwd=True, cache=given)
    toy(example()).backward()
    levels = [handle.context_level for handle in toy.blocks[0].hook_out.fwd_hooks]
    caching = toy.is_caching
    toy.reset_hooks()
    every: dict = {}
    some: dict = {}
    toy.cache_all(every, incl_bwd=True)
    toy.cache_some(some, lambda name: name == "hook_embed", remove_batch_dim=True)
    toy(example(1)).backward()
    toy.reset_hooks()
    got, fwd, bwd = toy.get_caching_hooks("hook_embed", incl_bwd=True, pos_slice=1)
    with toy.hooks(fwd_hooks=fwd, bwd_hooks=bwd):
        toy(example()).backward()
    names = [[name for name, _ in hooks] for hooks in (fwd, bwd)]
    return given, returned is given, levels, caching, every, some, got, names


def cached_before_and_after_an_edit(toy: Any, lib: Any) -> Any:
    def doubled(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        return 2 * tensor

    with toy.hooks(fwd_hooks=[("hook_embed", doubled)]):
        _, cache = toy.run_with_cache(example())
        toy.add_hook("blocks.0.hook_out", doubled, prepend=True)
        return cache, toy.run_with_cache(example())


def aliases_and_conversions(toy: Any, lib: Any) -> Any:
    log: list[Any] = []

    def doubled(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        hook.ctx["seen"] = hook.ctx.get("seen", 0) + 1
        log.append((hook.name, tensor.detach().clone()))
        return 2 * tensor

    conversion = SimpleNamespace(convert=lambda value: value.flatten(-2), revert=lambda value: value.view(2, 4, 2, 3))
    point = toy.blocks[1].attn.hook_z
    point.add_hook(doubled, alias_names=["blocks.7.one", "blocks.8.two"])
    point.add_hook(lambda tensor, hook: log.append(hook.layer()), alias_names=["blocks.7.one"])
    plain = toy(example())
    point.enable_reshape(conversion)
    with toy.hooks(bwd_hooks=[(point.name, doubled)]):
        toy(example()).backward()
    return plain, toy(example()), log, point.ctx


def checks_of_a_subclass(toy: Any, lib: Any) -> Any:
    asked: list[Any] = []

    def refuse(hook_point: Any, hook_point_name: str, hook: Any, **arguments: Any) -> None:
        asked.append((hook_point.name, hook_point_name, arguments))
        assert "attn" not in hook_point_name

    def nothing(tensor: torch.Tensor, hook: Any) -> None: ...

    toy.check_hooks_to_add = refuse
    errors = [
        outcome(lambda: toy.add_hook("blocks.0.attn.hook_z", nothing)),
        outcome(lambda: toy.add_hook(lambda name: name.startswith("blocks.0"), nothing, "bwd", True, 4, True)),
        outcome(lambda: toy.run_with_hooks(example(), fwd_hooks=[("blocks.0.attn.hook_z", nothing)])),
    ]
    return asked, errors, {name: len(handles) for name, handles in toy.list_hooks().items()}


def refusals(toy: Any, lib: Any) -> Any:
    def nothing(tensor: torch.Tensor, hook: Any) -> None: ...

    return [
        outcome(act)
        for act in (
            lambda: toy.add_hook("nobody", nothing),
            lambda: toy.add_perma_hook("nobody", nothing),
            lambda: toy.add_hook("blocks.0", nothing),
            lambda: toy.add_hook("hook_embed", nothing, dir="sideways"),
            lambda: toy.run_with_hooks(example(), fwd_hooks=[("nobody", nothing)]),
            lambda: toy.run_with_hooks(example(), fwd_hooks=[("blocks.0", nothing)]),
            lambda: toy.run_with_hooks(example(), bwd_hooks=[("nobody", nothing)], reset_hooks_end=False),
            lambda: toy.run_with_hooks(example(), fwd_hooks=[("hook_embed", lambda tensor: tensor)]),
            lambda: toy.run_with_cache(example(), names_filter=3),
            lambda: toy.add_caching_hooks(names_filter=3),
            lambda: toy.hook_embed.remove_hooks("sideways"),
            lambda: toy.run_with_cache(example(), no_such_argument=1),
        )
    ] + [toy.context_level, toy.list_hooks()]


def model_calls_inside_a_hook(toy: Any, lib: Any) -> Any:
    log: list[Any] = []

    def run_again(tensor: torch.Tensor, hook: Any) -> None:
        if len(log) < 2:
            log.append(hook.name)
            log.append(toy.run_with_cache(example(), names_filter="hook_embed"))
            log.append(toy.context_level)

    return toy.run_with_hooks(example(), fwd_hooks=[("blocks.0.hook_out", run_again)]), log


def torch_hooks_on_the_root(toy: Any, lib: Any) -> Any:
    log: list[str] = []
    toy.register_forward_hook(lambda *_: log.append("root"))
    toy.run_with_hooks(example())
    log.append("then")
    toy.run_with_cache(example())
    return log


PROGRAMS = [
    names_and_modules,
    firing_order,
    edits,
    backward_edits,
    wrong_returns,
    context_levels,
    has_and_list_hooks,
    caches,
    cache_left_on,
    caching_hooks_by_hand,
    cached_before_and_after_an_edit,
    aliases_and_conversions,
    checks_of_a_subclass,
    refusals,
    model_calls_inside_a_hook,
    torch_hooks_on_the_root,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_gives_the_same_on_both(program: Callable[[Any, Any], Any]) -> None:
    expected, found = (program(toy_on(lib), lib) for lib in LIBRARIES.values())
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["HookPoint", "HookedRootModule"])
def test_methods_take_the_same_arguments_with_the_same_defaults(name: str) -> None:
    real, ours = (getattr(lib, name) for lib in LIBRARIES.values())
    names = [each for each in dir(real) if each not in dir(nn.Module) and not each.startswith("_")]
    for each in [*names, "__init__"]:
        if not callable(getattr(real, each)):
            continue
        expected, found = (inspect.signature(getattr(lib, each)).parameters.values() for lib in (real, ours))
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected], each
