"""Families that TransformerLens does not load, under its names: held to Hugging Face and to what the names promise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from compat.tlens import HookedTransformer
from engine.errors import Refused, UnknownName
from tests.engine.families import FAMILIES, STATEFUL, build

# LayerNorm with a gate, one norm for two, scaled logits, latent attention, other mixers, experts beside a dense layer
NAMES = (
    "StableLm", "Cohere", "Granite", "Falcon", "SmolLM3", "Starcoder2", "Glm4", "GPTBigCode", "Qwen3Moe", "DeepseekV2",
    "DeepseekV3", "Qwen3Next", "Lfm2", "Mamba", "Mpt", "Nemotron",
)  # fmt: skip
RAW = dict(fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)
TOKENS = torch.arange(24).view(2, 12) * 7 % 200 + 3  # none is the padding token


@cache
def hugging_face(family: str) -> Any:
    return build(family)


@pytest.fixture(params=[(name, processed) for name in NAMES for processed in (True, False)], ids=str, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    family, processed = request.param
    model = HookedTransformer.from_pretrained(f"tiny/{family}", hf_model=build(family), **{} if processed else RAW)
    model.family, model.is_processed = family, processed
    return model


def expected_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = hugging_face(model.family)(TOKENS, use_cache=False).logits
    return logits - logits.mean(-1, keepdim=True) if model.is_processed else logits


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@torch.no_grad()
def test_names_add_up_to_the_logits(model: Any) -> None:
    logits, cache = model.run_with_cache(TOKENS)
    assert set(cache.keys()) == {name for name in model.hook_dict if not name.endswith(("_in", "_input", "result"))} | {"unembed.hook_in"}
    assert close(logits, expected_logits(model)) and close(cache["unembed.hook_out"], logits)
    assert close(cache["unembed.hook_in"] @ model.W_U + model.b_U, logits)
    stream = cache["hook_embed"] + (cache["hook_pos_embed"] if "hook_pos_embed" in cache else 0)
    for layer in range(model.cfg.n_layers):
        assert close(cache["resid_pre", layer], stream)
        for part in ("attn_out", "mlp_out"):
            if f"blocks.{layer}.hook_{part}" in cache:
                stream = stream + cache[part, layer]
        assert close(cache["resid_post", layer], stream, 1e-4)


@torch.no_grad()
def test_an_edit_at_every_name_reaches_the_logits_and_one_that_changes_nothing_does_not(model: Any) -> None:
    plain = model(TOKENS)
    for name in model.hook_dict:
        if name.endswith(("hook_attn_in", "_input", "hook_mlp_in", "hook_result", "indices")):
            continue
        assert close(model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x.clone())]), plain, 2e-5), name
        edited = model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x * (1.2 + 0.3 * torch.rand_like(x)))])
        assert (edited - plain).abs().max() > 1e-5 * plain.abs().max(), f"an edit at {name} reached nothing"


def test_a_gradient_reaches_every_name(model: Any) -> None:
    _, cache = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    for name in model.hook_dict:
        if name in cache and cache[name].is_floating_point() and "router" not in name:
            assert f"{name}_grad" in cache, name


@torch.no_grad()
def test_greedy_ids_are_hugging_faces(model: Any) -> None:
    settings = dict(max_new_tokens=5, do_sample=False)
    found = model.generate(TOKENS, stop_at_eos=False, verbose=False, use_past_kv_cache=model.family not in STATEFUL, **settings)
    expected = hugging_face(model.family).generate(TOKENS, eos_token_id=None, pad_token_id=0, **settings)
    assert found.tolist() == expected.tolist()


@torch.no_grad()
def test_an_edited_weight_takes_effect_and_the_rest_of_the_model_stays(model: Any) -> None:
    fresh = HookedTransformer.from_pretrained(f"tiny/{model.family}", hf_model=build(model.family), **{} if model.is_processed else RAW)
    fresh.unembed.W_U[:, 3] = 0
    expected = expected_logits(model).clone()
    bias = fresh.b_U[3]
    expected[..., 3] = bias
    assert close(fresh(TOKENS), expected)


def test_what_a_layer_lacks_is_refused_with_the_reason() -> None:
    mamba = HookedTransformer.from_pretrained("tiny/Mamba", hf_model=build("Mamba"))
    with pytest.raises(UnknownName, match="no attention heads"):
        mamba.add_hook("blocks.0.attn.hook_z", print)
    with pytest.raises(Refused, match="no attention heads"):
        mamba.W_Q  # noqa: B018
    deepseek = HookedTransformer.from_pretrained("tiny/DeepseekV3", hf_model=build("DeepseekV3"))
    with pytest.raises(UnknownName, match="shared latent"):
        deepseek.add_hook("blocks.0.attn.hook_k", print)
    assert "blocks.0.attn.hook_pattern" in deepseek.hook_dict and set(NAMES) <= set(FAMILIES)
