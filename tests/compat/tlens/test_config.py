"""The config: what follows from what, what it refuses, and the one that an engine's facts give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig, config_from_facts
from compat.tlens.loading_from_pretrained import get_pretrained_model_config
from engine.errors import Refused
from engine.seam import Facts

SIZES: dict[str, Any] = dict(d_model=12, d_head=3, n_layers=2, n_ctx=7, d_vocab=5, device="cpu")
FACTS: dict[str, Any] = dict(
    model_id="org/tiny",
    architecture="LlamaForCausalLM",
    n_layers=2,
    d_model=12,
    n_heads=4,
    n_kv_heads=2,
    d_head=3,
    d_mlp=20,
    d_vocab=5,
    n_ctx=7,
    norm="rms",
    eps=1e-6,
    act_fn="silu",
    gated_mlp=True,
    parallel=False,
    positions="rotary",
    rotary_dim=2,
    rotary_base=500.0,
    rotary_adjacent_pairs=False,
    attn_scale=3**0.5,
    attn_softcap=None,
    logit_softcap=None,
    sliding_windows=(None, None),
    qk_norm=False,
    post_norms=False,
    n_experts=None,
    experts_per_token=None,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def facts(**changes: Any) -> Facts:
    return Facts(**FACTS | changes)


def test_sizes_left_unset_follow_from_the_others() -> None:
    cfg = HookedTransformerConfig(**SIZES, positional_embedding_type="rotary")
    assert (cfg.n_heads, cfg.d_mlp, cfg.d_vocab_out, cfg.rotary_dim) == (4, 48, 5, 3)
    assert cfg.attn_scale == pytest.approx(3**0.5)
    assert cfg.initializer_range == pytest.approx(0.8 / 12**0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(act_fn="no_such"),
        dict(use_local_attn=True),
        dict(num_experts=4),
        dict(n_devices=1000),
        dict(default_prepend_bos="yes"),
    ],
)
def test_a_value_that_means_nothing_is_an_assertion_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        HookedTransformerConfig(**SIZES | wrong)


def test_a_width_that_no_number_of_heads_fills_is_refused() -> None:
    with pytest.raises(ValueError, match="divisible"):
        HookedTransformerConfig(**SIZES | dict(d_head=5))


def test_a_seed_fixes_what_is_drawn_after_it() -> None:
    HookedTransformerConfig(**SIZES, seed=3)
    first = torch.rand(4)
    HookedTransformerConfig(**SIZES, seed=3)
    assert first.equal(torch.rand(4))


def test_to_dict_is_live_and_from_dict_reads_it_back() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    cfg.to_dict()["n_ctx"] = 9
    assert cfg.n_ctx == 9
    assert HookedTransformerConfig.from_dict(cfg.to_dict()) == cfg
    assert HookedTransformerConfig.unwrap(cfg) is cfg
    assert HookedTransformerConfig.unwrap(dict(cfg.to_dict())) == cfg


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        HookedTransformerConfig.from_dict(SIZES | dict(no_such=1))


def test_a_folder_gives_its_last_part_as_the_model_name() -> None:
    cfg = config_from_facts(facts(), model_name="/models/mine/")
    assert (cfg.model_name, cfg.tokenizer_name) == ("mine", "/models/mine/")


def test_layers_with_a_window_are_local() -> None:
    cfg = config_from_facts(facts(sliding_windows=(None, 4)))
    assert (cfg.use_local_attn, cfg.window_size, cfg.attn_types) == (True, 4, ["global", "local"])


@pytest.mark.parametrize(("architecture", "prepends"), [("Qwen3ForCausalLM", False), ("LlamaForCausalLM", True)])
def test_whether_bos_is_prepended_is_the_familys_unless_given(architecture: str, prepends: bool) -> None:
    assert config_from_facts(facts(architecture=architecture)).default_prepend_bos is prepends
    given = config_from_facts(facts(architecture=architecture), default_prepend_bos=not prepends)
    assert given.default_prepend_bos is not prepends


def test_a_model_with_an_activation_of_its_own_keeps_its_name() -> None:
    assert config_from_facts(facts(act_fn="quick_gelu")).act_fn == "quick_gelu"
    assert config_from_facts(facts(act_fn="swish")).act_fn == "silu"


def test_given_fields_override_the_facts() -> None:
    cfg = config_from_facts(facts(), n_ctx=3, from_checkpoint=True, checkpoint_value=100)
    assert (cfg.n_ctx, cfg.from_checkpoint, cfg.checkpoint_value) == (3, True, 100)


def test_a_family_that_its_config_does_not_describe_is_refused(tmp_path: Any) -> None:
    from transformers import OPTConfig

    OPTConfig(architectures=["OPTForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="OPTForCausalLM"):
        get_pretrained_model_config(str(tmp_path))
