"""What a researcher relies on, held by the numbers themselves: parts add up, patches restore, edits and hooks agree.

The same programs on the real library are in tests/parity/test_tlens_scripts.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import einops
import pytest
import torch
from torch import Tensor

from compat.tlens import ActivationCache, FactoredMatrix, HookedTransformer, patching, utils
from tests import hub

CLEAN, CORRUPTED = torch.arange(20, 31)[None], torch.arange(60, 71)[None]


@pytest.fixture(params=hub.NAMES)
def model(request: pytest.FixtureRequest, shared: Any) -> HookedTransformer:
    return shared(request.param)


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 5] - logits[0, -1, 8]


def scaled(model: HookedTransformer, cache: ActivationCache, parts: Tensor) -> Tensor:
    """What parts of the final stream `[part, batch, pos, d_model]` add to the logit of token 5, before any soft cap."""
    return cache.apply_ln_to_stack(parts, layer=-1) @ model.W_U[:, 5]


@torch.no_grad()
def test_parts_of_the_stream_add_up_to_the_logits(model: HookedTransformer, is_close: Any) -> None:
    _, cache = model.run_with_cache(CLEAN)
    before_cap = cache["unembed.hook_out"][..., 5] - model.b_U[5]
    assert is_close(scaled(model, cache, cache.decompose_resid(layer=-1)).sum(0), before_cap, 1e-4)
    if not model.cfg.use_normalization_before_and_after:  # there a norm stands between the heads and the stream
        parts = cache.get_full_resid_decomposition(layer=-1, expand_neurons=False)
        assert is_close(scaled(model, cache, parts).sum(0), before_cap, 1e-4)


@torch.no_grad()
def test_decomposition_leaves_no_rest(model: HookedTransformer, is_close: Any) -> None:
    _, cache = model.run_with_cache(CLEAN)
    assert is_close(cache.decompose_resid(layer=-1).sum(0), cache["resid_post", -1], 1e-5)
    assert is_close(cache.accumulated_resid(layer=-1)[-1], cache["resid_post", -1], 1e-6)


@torch.no_grad()
def test_heads_by_their_weights_are_the_attentions_output(model: HookedTransformer, is_close: Any) -> None:
    if model.cfg.use_normalization_before_and_after:
        pytest.skip("a norm stands between the heads and the stream")
    _, cache = model.run_with_cache(CLEAN)
    for layer in range(model.cfg.n_layers):
        out = einops.einsum(cache["z", layer], model.W_O[layer], "b p h d, h d m -> b p m") + model.b_O[layer]
        assert is_close(out, cache["attn_out", layer], 1e-5)


@torch.no_grad()
def test_patching_everything_at_one_depth_restores_the_clean_run(model: HookedTransformer, is_close: Any) -> None:
    logits, cache = model.run_with_cache(CLEAN)
    for layer in range(model.cfg.n_layers):
        patch = (utils.get_act_name("resid_pre", layer), lambda x, hook: cache[hook.name])
        assert is_close(model.run_with_hooks(CORRUPTED, fwd_hooks=[patch]), logits, 1e-5)
    whole = [
        (lambda name: name == "hook_embed" or name.endswith(("attn_out", "mlp_out")), lambda x, hook: cache[hook.name])
    ]
    assert is_close(model.run_with_hooks(CORRUPTED, fwd_hooks=whole), logits, 1e-4)


@torch.no_grad()
def test_patching_the_same_run_into_itself_changes_nothing(model: HookedTransformer, is_close: Any) -> None:
    logits, cache = model.run_with_cache(CLEAN)
    for name in ("q", "k", "v", "z", "pattern", "attn_scores", "pre", "post", "normalized", "scale"):
        patch = (
            lambda each, name=name: each in cache and each.endswith(f"hook_{name}"),
            lambda x, hook: cache[hook.name],
        )
        assert is_close(model.run_with_hooks(CLEAN, fwd_hooks=[patch]), logits, 1e-4), name


@torch.no_grad()
def test_patching_helpers_agree_with_patching_by_hand(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(CLEAN)
    helped = patching.get_act_patch_resid_pre(model, CORRUPTED, cache, metric)

    def patch(x: Tensor, hook: Any, position: int) -> None:
        x[:, position] = cache[hook.name][:, position]

    for layer, position in ((0, 3), (1, 7), (2, 10)):
        hook = (f"blocks.{layer}.hook_resid_pre", partial(patch, position=position))
        by_hand = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[hook]))
        assert torch.allclose(helped[layer, position], by_hand, atol=1e-5)


def test_attribution_is_the_slope_of_patching(model: HookedTransformer) -> None:
    """First order: a small step from the corrupted towards the clean value moves the metric as the gradient says."""
    step, point = 1e-2, "blocks.1.attn.hook_z"
    with torch.no_grad():
        _, clean = model.run_with_cache(CLEAN)
    grads, corrupted = {}, {}
    with model.hooks(
        fwd_hooks=[(point, lambda x, hook: corrupted.update(x=x.detach().clone()))],
        bwd_hooks=[(point, lambda grad, hook: grads.update(x=grad.clone()))],
    ):
        before = metric(model(CORRUPTED))
        before.backward()
    model.zero_grad()
    predicted = (grads["x"] * (clean[point] - corrupted["x"])).sum() * step

    def moved(sign: float) -> Tensor:
        return metric(
            model.run_with_hooks(CORRUPTED, fwd_hooks=[(point, lambda x, hook: x + sign * step * (clean[point] - x))])
        )

    with torch.no_grad():
        slope = (moved(1) - moved(-1)) / 2
    assert torch.allclose(slope, predicted, rtol=2e-2, atol=1e-5)


@torch.no_grad()
def test_ablating_a_neuron_by_hook_and_by_weight_is_the_same(load: Any, is_close: Any) -> None:
    for family in hub.NAMES:
        model = load(family)

        def kill(post: Tensor, hook: Any) -> None:
            post[..., 11] = 0

        by_hook = model.run_with_hooks(CLEAN, fwd_hooks=[("blocks.1.mlp.hook_post", kill)])
        model.blocks[1].mlp.W_out[11] = 0
        assert is_close(model(CLEAN), by_hook, 1e-5), family


@torch.no_grad()
def test_steering_is_the_same_as_a_bias_of_the_layer(load: Any, is_close: Any) -> None:
    model = load("gpt2")
    direction = torch.randn(128, generator=torch.Generator().manual_seed(0))
    by_hook = model.run_with_hooks(CLEAN, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x + direction)])
    model.blocks[1].mlp.b_out += direction
    assert is_close(model(CLEAN), by_hook, 1e-5)


@torch.no_grad()
def test_logits_in_two_halves_are_the_logits(model: HookedTransformer, is_close: Any) -> None:
    for layer in range(model.cfg.n_layers + 1):
        residual = model(CLEAN, stop_at_layer=layer)
        assert is_close(model(residual, start_at_layer=layer), model(CLEAN), 1e-5)


@torch.no_grad()
def test_attention_by_the_weights_is_the_pattern(shared: Any, is_close: Any) -> None:
    model = shared("gpt2")
    _, cache = model.run_with_cache(CLEAN)
    normalized = cache["normalized", 1, "ln1"]
    q = einops.einsum(normalized, model.W_Q[1], "b p m, h m d -> b p h d") + model.b_Q[1]
    k = einops.einsum(normalized, model.W_K[1], "b p m, h m d -> b p h d") + model.b_K[1]
    scores = einops.einsum(q, k, "b q h d, b k h d -> b h q k") / model.blocks[1].attn.attn_scale
    scores = scores.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    assert is_close(scores.softmax(-1), cache["pattern", 1], 1e-5)


@torch.no_grad()
def test_singular_vectors_rebuild_the_circuit(shared: Any, is_close: Any) -> None:
    model = shared("gpt2")
    circuit = model.blocks[1].attn.OV
    assert isinstance(circuit, FactoredMatrix)
    U, S, V = circuit.svd()
    assert is_close(
        (U * S[..., None, :]) @ V.transpose(-2, -1) if V.shape[-1] == S.shape[-1] else (U * S[..., None, :]) @ V,
        circuit.AB,
        1e-4,
    )
