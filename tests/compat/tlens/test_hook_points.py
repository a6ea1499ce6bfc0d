"""Hook points and root modules on a user's own module, with no engine and no other library."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from compat.tlens.hook_points import HookedRootModule, HookPoint
from engine.errors import BadInput, CompatError, UnknownName


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hook_z = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.hook_z(self.linear(x).unflatten(-1, (2, 3)))
        return self.hook_out(heads.flatten(-2).tanh())


class Toy(HookedRootModule):
    """[batch, pos, 6] -> [batch, pos, 6]"""

    def __init__(self) -> None:
        super().__init__()
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.setup()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.hook_embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 4, 6, requires_grad=True)


def nothing(tensor: torch.Tensor, hook: HookPoint) -> None:
    return None


def test_unknown_hook_name_raises_with_the_nearest_names_and_leaves_no_hook(toy: Toy, x: torch.Tensor) -> None:
    good = ("blocks.0.hook_z", nothing)
    for attempt in (
        lambda: toy.add_hook("blocks.1.hook_zz", nothing),
        lambda: toy.run_with_hooks(x, fwd_hooks=[good, ("blocks.1.hook_zz", nothing)]),
        lambda: toy.run_with_hooks(x, bwd_hooks=[good, ("blocks.1.hook_zz", nothing)], reset_hooks_end=True),
    ):
        with pytest.raises(UnknownName, match="'blocks.1.hook_zz'.*'blocks.1.hook_z'") as caught:
            attempt()
        assert isinstance(caught.value, KeyError)
        assert toy.list_hooks() == {} and toy.context_level == 0


def test_hook_on_a_module_that_takes_none_is_refused_by_name(toy: Toy, x: torch.Tensor) -> None:
    for attempt in (
        lambda: toy.add_hook("blocks.0", nothing),
        lambda: toy.run_with_hooks(x, fwd_hooks=[("blocks.0", nothing)]),
    ):
        with pytest.raises(CompatError, match="'blocks.0' is a Block"):
            attempt()


def test_exception_of_a_hook_comes_through_untouched_and_its_hooks_are_gone(toy: Toy, x: torch.Tensor) -> None:
    class Mine(Exception):
        pass

    mine = Mine("from the hook")

    def raises(tensor: torch.Tensor, hook: HookPoint) -> None:
        raise mine

    with pytest.raises(Mine) as caught:
        toy.run_with_hooks(x, fwd_hooks=[("hook_embed", nothing), ("blocks.0.hook_z", raises)])
    assert caught.value is mine and mine.__cause__ is None
    assert caught.traceback[-1].name == "raises"
    assert toy.list_hooks() == {} and toy.context_level == 0


def test_each_context_takes_off_its_own_hooks_only(toy: Toy) -> None:
    toy.add_hook("hook_embed", nothing)
    toy.add_perma_hook("hook_embed", nothing)
    with toy.hooks(fwd_hooks=[("hook_embed", nothing)]):
        with pytest.raises(ZeroDivisionError), toy.hooks(fwd_hooks=[("hook_embed", nothing)]):
            assert len(toy.hook_embed.fwd_hooks) == 4
            raise ZeroDivisionError
        assert len(toy.hook_embed.fwd_hooks) == 3
    assert len(toy.hook_embed.fwd_hooks) == 2
    toy.reset_hooks()
    assert [handle.is_permanent for handle in toy.hook_embed.fwd_hooks] == [True]
    toy.reset_hooks(including_permanent=True)
    assert toy.hook_embed.fwd_hooks == [] and not toy.hook_embed.is_live


def test_names_filter_that_matches_nothing_is_silent(toy: Toy, x: torch.Tensor) -> None:
    for nobody in ("hook_nobody", ["hook_nobody"], lambda name: False):
        assert toy.run_with_cache(x, names_filter=nobody)[1] == {}


@pytest.mark.parametrize("bad", [("hook_embed",), 3, {"hook_embed"}])
def test_names_filter_of_another_kind_is_refused(toy: Toy, x: torch.Tensor, bad: object) -> None:
    for attempt in (lambda: toy.run_with_cache(x, names_filter=bad), lambda: toy.add_caching_hooks(bad)):
        with pytest.raises(BadInput, match="names_filter"):
            attempt()
    assert not toy.is_caching


def test_cached_tensor_is_detached_and_not_copied(toy: Toy, x: torch.Tensor) -> None:
    _, cache = toy.run_with_cache(x, names_filter="hook_embed")
    assert not cache["hook_embed"].requires_grad
    assert cache["hook_embed"].data_ptr() == x.data_ptr()


def test_batch_axis_of_a_value_with_no_position_axis_is_removed_too() -> None:
    class Flat(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook_flat = HookPoint()
            self.setup()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hook_flat(x)

    _, cache = Flat().run_with_cache(torch.arange(5.0)[None], remove_batch_dim=True)
    assert cache["hook_flat"].tolist() == [0, 1, 2, 3, 4]


def test_replaced_hook_point_is_a_module_and_no_longer_a_hook_point(toy: Toy, x: torch.Tensor) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hook_inner = HookPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.hook_inner(2 * x)

    toy.hook_embed = Double()
    toy.setup()
    _, cache = toy.run_with_cache(x)
    assert "hook_embed" not in toy.hook_dict and isinstance(toy.mod_dict["hook_embed"], Double)
    assert torch.equal(cache["hook_embed.hook_inner"], 2 * x)
    with pytest.raises(AssertionError):
        toy.add_hook("hook_embed", nothing)


def test_point_is_live_while_anything_is_on_it() -> None:
    def patched(x: torch.Tensor) -> torch.Tensor:
        return x

    ways = {
        "lens forward": lambda point: point.add_hook(nothing),
        "lens backward": lambda point: point.add_hook(nothing, dir="bwd"),
        "torch forward": lambda point: point.register_forward_hook(lambda *_: None),
        "torch pre": lambda point: point.register_forward_pre_hook(lambda *_: None),
        "torch backward": lambda point: point.register_full_backward_hook(lambda *_: None),
        "torch backward pre": lambda point: point.register_full_backward_pre_hook(lambda *_: None),
        "patched": lambda point: setattr(point, "forward", patched),
    }
    for way, put in ways.items():
        point = HookPoint()
        assert not point.is_live
        handle = put(point)
        assert point.is_live and not point.reads_only, way
        if handle is not None:
            handle.remove()
            assert not point.is_live, way


def test_subclass_with_a_forward_of_its_own_is_always_live() -> None:
    class Doubling(HookPoint):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert Doubling().is_live and not Doubling().reads_only


def test_point_reads_only_while_caching_hooks_alone_are_on_it(toy: Toy) -> None:
    _, caching, caching_grad = toy.get_caching_hooks(incl_bwd=True)
    point = toy.hook_embed
    with toy.hooks(fwd_hooks=caching):
        assert point.is_live and point.reads_only
        with toy.hooks(fwd_hooks=[("hook_embed", nothing)]):
            assert not point.reads_only
        plain = point.register_forward_hook(lambda *_: None)
        assert not point.reads_only
        plain.remove()
        assert point.reads_only
        with toy.hooks(bwd_hooks=caching_grad):
            assert not point.reads_only
    toy.add_caching_hooks()
    assert point.reads_only
    toy.reset_hooks()
    point.add_hook(partial(caching[0][1]))
    assert not point.reads_only


def test_deepcopy_of_a_module_has_hook_points_of_its_own(toy: Toy, x: torch.Tensor) -> None:
    twin = copy.deepcopy(toy)
    twin.add_hook("hook_embed", lambda tensor, hook: tensor * 0)
    assert not toy.hook_embed.is_live
    assert not torch.equal(twin(x), toy(x))


def test_direction_of_another_name_is_refused(toy: Toy) -> None:
    for attempt in (
        lambda: toy.hook_embed.add_hook(nothing, dir="both"),
        lambda: toy.hook_embed.remove_hooks("forward"),
        lambda: toy.hook_embed.has_hooks("forward"),
    ):
        with pytest.raises(ValueError, match="direction"):
            attempt()


def test_backward_hooks_that_can_never_run_are_warned_of(toy: Toy, x: torch.Tensor, caplog) -> None:
    toy.run_with_hooks(x, bwd_hooks=[("hook_embed", nothing)])
    assert "bwd_hooks" in caplog.text
