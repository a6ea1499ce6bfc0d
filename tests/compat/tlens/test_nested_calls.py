"""A model called inside a hook: the inner forward has hooks of its own, and the outer one goes on unharmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.tlens import HookedTransformer
from tests import hub

POINT = "blocks.1.hook_resid_mid"
PLACES = (
    "hook_embed",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_pattern",
    "blocks.1.attn.hook_z",
    "blocks.1.mlp.hook_post",
    "blocks.2.hook_resid_post",
    "unembed.hook_out",
)
OTHER = torch.arange(100, 107)[None]


def halve(x: Tensor, hook: Any) -> Tensor:
    return x * 0.5


Act = Callable[[HookedTransformer], Tensor]
INNER: dict[str, Act] = {
    "plain": lambda model: model(OTHER),
    "with hooks": lambda model: model.run_with_hooks(OTHER, fwd_hooks=[("blocks.0.attn.hook_pattern", halve)]),
    "with cache": lambda model: model.run_with_cache(OTHER)[1]["blocks.2.attn.hook_pattern"],
    "stopped": lambda model: model(OTHER, stop_at_layer=2),
    "started": lambda model: model(torch.ones(1, 3, model.cfg.d_model), start_at_layer=1),
    "generate": lambda model: model.generate(OTHER, max_new_tokens=3, do_sample=False, verbose=False),
    "block": lambda model: model.blocks[2](torch.ones(1, 3, model.cfg.d_model)),
    "attention": lambda model: model.blocks[0].attn(*[torch.ones(1, 3, model.cfg.d_model)] * 3),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_same_model_may_be_called_inside_a_hook(
    shared: Any, unharmed: Any, is_close: Any, ids: Tensor, place: str, inner: str
) -> None:
    model, act = shared("gpt2"), INNER[inner]
    outside, plain = act(model), model(ids)
    seen = []

    def call(x: Tensor, hook: Any) -> None:
        if not seen:  # the hook is on the model that it calls
            seen.append(None)
            seen.append(act(model))

    with unharmed(model):
        logits = model.run_with_hooks(ids, fwd_hooks=[(place, call)])
    assert is_close(seen[1].float(), outside.float())
    assert torch.allclose(logits, plain, atol=1e-5)


@pytest.mark.parametrize("family", hub.NAMES)
@torch.no_grad()
def test_outer_hooks_fire_in_the_inner_forward_too(shared: Any, unharmed: Any, ids: Tensor, family: str) -> None:
    """As in TransformerLens, where hooks are on the modules."""
    model, depth = shared(family), []

    def call(x: Tensor, hook: Any) -> None:
        depth.append(len(x))
        if len(depth) < 3:
            model(OTHER)

    with unharmed(model):
        model.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_post", call)])
    assert depth == [2, 1, 1]


@torch.no_grad()
def test_another_model_may_be_called_inside_a_hook(shared: Any, unharmed: Any, is_close: Any, ids: Tensor) -> None:
    """Residuals of one model patched into another of the same width."""
    model, other = shared("gpt2"), shared("EleutherAI/pythia-70m")
    theirs = other.run_with_cache(ids)[1][POINT.replace("mid", "post")]
    expected = model.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: theirs)])

    def patch(x: Tensor, hook: Any) -> Tensor:
        return other.run_with_cache(ids, names_filter=hook.name)[1][hook.name]

    with unharmed(model), unharmed(other):
        assert is_close(model.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_resid_post", patch)]), expected)


@torch.no_grad()
def test_error_in_the_inner_forward_comes_out_of_the_outer_one(shared: Any, unharmed: Any, ids: Tensor) -> None:
    model, mine = shared("gpt2"), ZeroDivisionError("mine")

    def breaks(x: Tensor, hook: Any) -> None:
        raise mine

    def call(x: Tensor, hook: Any) -> None:
        model.run_with_hooks(OTHER, fwd_hooks=[("blocks.0.hook_resid_post", breaks)])

    with unharmed(model), pytest.raises(ZeroDivisionError) as caught:
        model.run_with_hooks(ids, fwd_hooks=[(POINT, call)])
    assert caught.value is mine


@torch.no_grad()
def test_error_in_the_inner_forward_that_the_hook_catches_leaves_the_outer_one_going(
    shared: Any, unharmed: Any, ids: Tensor
) -> None:
    model, plain = shared("gpt2"), shared("gpt2")(ids)

    def call(x: Tensor, hook: Any) -> None:
        with pytest.raises(IndexError):
            model(torch.tensor([[9999]]))

    with unharmed(model):
        assert torch.allclose(model.run_with_hooks(ids, fwd_hooks=[(POINT, call)]), plain, atol=1e-5)


def test_gradients_of_inner_and_outer_forward_are_both_right(shared: Any, ids: Tensor) -> None:
    model, grads = shared("gpt2"), []

    def inner() -> None:
        residual = torch.ones(1, 3, model.cfg.d_model, requires_grad=True)
        model(residual, start_at_layer=1).sum().backward()
        grads.append(residual.grad)

    def call(x: Tensor, hook: Any) -> None:
        if len(grads) == 1:  # the hook is on the model that it calls
            grads.append(None)
            inner()

    inner()
    outer = []
    for hooks in ([], [(POINT, call)]):
        with model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(ids, return_type="loss", incl_bwd=True, names_filter="hook_embed")
        outer.append(cache["hook_embed_grad"])
    assert torch.allclose(grads[0], grads[2], atol=1e-5)
    assert torch.allclose(outer[0], outer[1], atol=1e-6)


@torch.no_grad()
def test_hook_may_add_and_remove_hooks_ahead(shared: Any, unharmed: Any, ids: Tensor) -> None:
    """A hook put on a later point while the forward runs fires in the next forward at the latest."""
    model, fired = shared("gpt2"), []

    def arm(x: Tensor, hook: Any) -> None:
        model.add_hook("blocks.2.hook_resid_post", lambda x, hook: fired.append(hook.name))

    with unharmed(model):
        model.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_pre", arm)])
        model(ids)
        assert fired
        model.reset_hooks()
