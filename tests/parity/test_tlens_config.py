"""The config of a loaded model, and of one that is not loaded, field by field against TransformerLens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from transformer_lens import HookedTransformerConfig as ReferenceConfig
from transformer_lens.loading_from_pretrained import get_pretrained_model_config as reference_config
from transformers import AutoConfig, AutoModelForCausalLM

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig, config_from_facts
from compat.tlens.loading_from_pretrained import fields_from_hf_config, get_pretrained_model_config
from engine.eager.facts import read_facts
from engine.eager.resolve import resolve
from tests.hub import NAMES
from tests.reference import reference_model, true_sizes

SIZES: dict[str, Any] = dict(d_model=12, d_head=3, n_layers=2, n_ctx=7, d_vocab=5, device="cpu")

# Fields that say nothing of a loaded model: how weights are first drawn, and how files are fetched.
SILENT = {"initializer_range", "trust_remote_code"}
# TransformerLens caps Qwen3's context at 2048 whatever the checkpoint says; the checkpoint is right.
WRONG_THERE = {"Qwen/Qwen3-0.6B": {"n_ctx"}}
RELATIVE = 1e-6  # 1 / (1 / sqrt(d)) against sqrt(d)


@functools.cache
def loaded(name: str) -> Any:
    return reference_model(name)


def differences(ours: Any, theirs: Any, but: set[str]) -> dict[str, tuple[Any, Any]]:
    """Fields whose values differ: name -> (ours, theirs)."""
    pairs = {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(ReferenceConfig)
        if field.name not in but
    }
    return {name: (one, other) for name, (one, other) in pairs.items() if not same(one, other)}


def same(one: Any, other: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    return one == pytest.approx(other, rel=RELATIVE) if numbers else one == other


def test_fields_their_order_and_defaults_are_the_same() -> None:
    ours, theirs = (
        [(field.name, field.default) for field in dataclasses.fields(kind)]
        for kind in (HookedTransformerConfig, ReferenceConfig)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(attn_only=True, act_fn=None),
        dict(gated_mlp=True, d_mlp=20, act_fn="silu"),
        dict(num_experts=4, experts_per_token=2, gated_mlp=True),
        dict(positional_embedding_type="rotary", n_heads=7),
        dict(init_mode="xavier_normal", use_attn_scale=False, act_fn="solu_ln"),
        dict(use_local_attn=True, window_size=3, attn_types=["global", "local"], d_vocab_out=2, device=None),
    ],
)
def test_derived_values_are_the_same(fields: dict[str, Any]) -> None:
    ours, theirs = (kind(**SIZES | fields) for kind in (HookedTransformerConfig, ReferenceConfig))
    assert differences(ours, theirs, set()) == {}
    assert ours.is_layer_norm_activation() == theirs.is_layer_norm_activation()
    assert ours.to_dict().keys() == theirs.to_dict().keys()
    assert repr(ours).splitlines()[0] == repr(theirs).splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_config_of_a_loaded_model_is_the_same(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(name)
    facts = read_facts(resolve(model, model.config), model.config, name)
    ours = config_from_facts(facts, model_name=name, **fields_from_hf_config(model.config))
    by_tokenizer = {"tokenizer_prepends_bos"}
    assert differences(ours, loaded(name).cfg, SILENT | WRONG_THERE.get(name, set()) | by_tokenizer) == {}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flags", [dict(fold_ln=True), dict(first_n_layers=2, default_prepend_bos=False)], ids=str)
def test_the_config_of_a_model_that_is_not_loaded_is_the_same(name: str, flags: dict[str, Any]) -> None:
    with true_sizes():
        theirs = reference_config(name, device="cpu", **flags)
    ours = get_pretrained_model_config(name, device="cpu", **flags)
    not_there = SILENT | WRONG_THERE.get(name, set()) | {"tokenizer_prepends_bos"}
    assert differences(ours, theirs, not_there) == {}


def test_a_given_n_ctx_counts() -> None:
    assert get_pretrained_model_config("gpt2", n_ctx=9).n_ctx == 9
    assert AutoConfig.from_pretrained("gpt2").n_positions != 9
