"""Gradients: of every cached name, of stashed activations, through backward hooks, and of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.pairs import Pair, assert_close, assert_same_cache, assert_same_gradients, random_tokens

LAYER = 1


@pytest.mark.parametrize("switched", [False, True], ids=["switches off", "switches on"])
def test_the_gradient_of_every_cached_name_is_theirs(pair: Pair, switched: bool) -> None:
    if switched:
        pair.switch("attn_result", "split_qkv_input", "hook_mlp_in")
    run = lambda model: model.run_with_cache(random_tokens(pair), return_type="loss", incl_bwd=True)  # noqa: E731
    (loss, cache), (their_loss, their_cache) = pair.both(run)
    assert_close(loss, their_loss)
    assert_same_gradients(pair, cache, their_cache)


def test_the_gradient_of_the_attention_stream_is_theirs(pair: Pair) -> None:
    if "attn_in" not in pair.switches:
        pytest.skip("grouped queries have no hook_attn_in")
    pair.switch("attn_in")
    run = lambda model: model.run_with_cache(random_tokens(pair), return_type="loss", incl_bwd=True)  # noqa: E731
    (_, cache), (_, their_cache) = pair.both(run)
    assert f"blocks.{LAYER}.hook_attn_in_grad" in their_cache
    assert_same_cache(cache, their_cache)


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 7].sum() - logits[:, 3, 11].sum()


def names_to_differentiate(pair: Pair) -> list[str]:
    everywhere = ("hook_embed", "ln_final.hook_normalized", "unembed.hook_out")
    inside = (
        "hook_resid_pre",
        "attn.hook_q",
        "attn.hook_v",
        "attn.hook_pattern",
        "attn.hook_z",
        "mlp.hook_post",
        "hook_mlp_out",
    )
    return [*everywhere, *(f"blocks.{layer}.{name}" for layer in (0, 2) for name in inside)]


def test_backward_hooks_see_the_gradient_of_a_metric(pair: Pair) -> None:
    tokens, names = random_tokens(pair), names_to_differentiate(pair)

    def run(model: Any) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def note(gradient: Tensor, hook: Any) -> None:
            seen[hook.name] = gradient.clone()

        with model.hooks(bwd_hooks=[(lambda name: name in names, note)]):
            metric(model(tokens)).backward()
        return seen

    found, expected = pair.both(run)
    assert set(expected) == set(names)
    assert_same_cache(found, expected)


def test_backward_hooks_on_the_stream_are_called_in_the_same_order_once_each(pair: Pair) -> None:
    tokens = random_tokens(pair)

    def run(model: Any) -> list[str]:
        seen: list[str] = []
        with model.hooks(bwd_hooks=[(lambda name: True, lambda gradient, hook: seen.append(hook.name))]):
            metric(model(tokens)).backward()
        return [name for name in seen if "resid" in name or name.endswith(("hook_z", "hook_mlp_out"))]

    found, expected = pair.both(run)
    assert found == expected


# Where several places share one tensor of gradients, as the stream and what is added to it do, PyTorch forbids to edit
# it in place: TransformerLens then changes the gradient at all of them.
CHANGED = [
    (ending, "returned") for ending in ("hook_resid_post", "hook_attn_out", "attn.hook_v", "attn.hook_attn_scores")
]
CHANGED += [("attn.hook_z", "in place"), ("mlp.hook_pre", "in place"), ("hook_mlp_out", "returned in a tuple")]


@pytest.mark.parametrize(("ending", "kind"), CHANGED)
def test_a_backward_hook_that_changes_the_gradient_changes_those_before_it(pair: Pair, ending: str, kind: str) -> None:
    name = f"blocks.{LAYER}.{ending}"

    def change(gradient: Tensor, hook: Any) -> Any:
        if kind == "in place":
            gradient[:, 0] = 0
            return None
        changed = gradient * 0.3
        return changed if kind == "returned" else (changed,)

    def run(model: Any) -> Any:
        cache, forward, backward = model.get_caching_hooks(
            lambda each: "resid" in each or "hook_v" in each, incl_bwd=True
        )
        with model.hooks(forward, [(name, change), *backward]):
            metric(model(random_tokens(pair))).backward()
        return cache

    found, expected = pair.both(run)
    assert found.keys() == expected.keys()
    assert_close([found[key] for key in expected], list(expected.values()))


def test_stashed_activations_can_be_differentiated_with_autograd(pair: Pair) -> None:
    tokens, names = random_tokens(pair), names_to_differentiate(pair)

    def run(model: Any) -> Any:
        kept: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            kept[hook.name] = value

        logits = model.run_with_hooks(tokens, fwd_hooks=[(lambda name: name in names, keep)])
        return list(torch.autograd.grad(metric(logits), [kept[name] for name in names]))

    found, expected = pair.both(run)
    for name, mine, other in zip(names, found, expected):
        assert_close(mine, other, name)


def test_a_value_that_a_hook_puts_in_receives_its_gradient(pair: Pair) -> None:
    """Leaves of the user's own: a mask on heads, a steering vector, and a whole replaced stream."""
    tokens = random_tokens(pair)
    cfg = pair.theirs.cfg
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2, 9, cfg.d_model, generator=generator)

    def run(model: Any) -> Any:
        heads = torch.linspace(0.2, 1, cfg.n_heads, requires_grad=True)
        steer = torch.full((cfg.d_model,), 0.1, requires_grad=True)
        stream = start.clone().requires_grad_()
        hooks = [
            ("blocks.0.attn.hook_z", lambda z, hook: z * heads[:, None]),
            ("blocks.1.hook_resid_pre", lambda x, hook: stream + 0.5 * x),
            ("blocks.2.hook_resid_post", lambda x, hook: x + steer),
        ]
        metric(model.run_with_hooks(tokens, fwd_hooks=hooks)).backward()
        return [heads.grad, steer.grad, stream.grad]

    assert_close(*pair.both(run))


def test_gradients_flow_from_a_residual_that_is_put_in(pair: Pair) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(2, 7, pair.theirs.cfg.d_model, generator=generator)

    def run(model: Any) -> Any:
        residual = start.clone().requires_grad_()
        metric(model(residual, start_at_layer=1)).backward()
        middle = start.clone().requires_grad_()
        (model(middle, start_at_layer=0, stop_at_layer=2) ** 3).sum().backward()
        return [residual.grad, middle.grad]

    assert_close(*pair.both(run))


def test_a_gradient_of_a_gradient_is_theirs_where_patterns_are_hooked(pair: Pair) -> None:
    """Elsewhere torch's fused attention is used, and it raises: it has no second derivative."""

    def run(model: Any) -> Tensor:
        kept = []
        hooks = [("blocks.1.hook_resid_pre", lambda x, hook: kept.append(x))]
        hooks += [(lambda name: name.endswith("hook_pattern"), lambda pattern, hook: None)]
        logits = model.run_with_hooks(random_tokens(pair), fwd_hooks=hooks)
        (first,) = torch.autograd.grad(metric(logits), kept, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), kept)[0]

    assert_close(*pair.both(run))


def test_every_parameter_receives_a_gradient(pair: Pair) -> None:
    loss = pair.ours(random_tokens(pair), return_type="loss")
    loss.backward()
    without = [name for name, parameter in pair.ours.named_parameters() if parameter.grad is None]
    assert not without
    pair.ours.zero_grad()


def test_nothing_is_differentiated_under_no_grad(pair: Pair) -> None:
    with torch.no_grad():
        for model in (pair.ours, pair.theirs):
            logits, cache = model.run_with_cache(random_tokens(pair))
            assert not logits.requires_grad and not any(value.requires_grad for value in cache.values())
    for model in (pair.ours, pair.theirs):
        logits, cache = model.run_with_cache(random_tokens(pair))
        assert logits.requires_grad and not any(value.requires_grad for value in cache.values())
