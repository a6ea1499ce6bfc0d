"""A weight that a program edits takes effect on the next forward, however it is edited; what others train shows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compat.tlens import HookedTransformer, HookedTransformerKeyValueCache
from engine.errors import BadInput, Refused
from tests import hub

LLAMA = "meta-llama/Llama-3.2-1B"
RAW = dict(fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False)


def hf_model(name: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, **options)


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


# --- ways of editing --------------------------------------------------------------------------------------------------


def in_place(model: HookedTransformer) -> None:
    model.W_E[5:9] *= 0


def through_data(model: HookedTransformer) -> None:
    model.embed.W_E.data[5:9] = 0


def through_a_view(model: HookedTransformer) -> None:
    rows = model.W_E[5:9]
    rows.zero_()


def through_numpy(model: HookedTransformer) -> None:
    model.W_E.numpy()[5:9] = 0


def by_assignment(model: HookedTransformer) -> None:
    table = model.W_E.clone()
    table[5:9] = 0
    model.embed.W_E = table


def by_a_new_parameter(model: HookedTransformer) -> None:
    table = model.W_E.clone()
    table[5:9] = 0
    model.embed.W_E = nn.Parameter(table)


def by_assigning_data(model: HookedTransformer) -> None:
    table = model.W_E.clone()
    table[5:9] = 0
    model.embed.W_E.data = table


def by_state_dict(model: HookedTransformer) -> None:
    weights = model.state_dict()
    weights["embed.W_E"][5:9] = 0
    model.load_state_dict(weights)


WAYS = (
    in_place,
    through_data,
    through_a_view,
    through_numpy,
    by_assignment,
    by_a_new_parameter,
    by_assigning_data,
    by_state_dict,
)


@pytest.mark.parametrize("edit", WAYS, ids=lambda edit: edit.__name__)
def test_every_way_of_editing_takes_effect_and_shows(
    gpt2: HookedTransformer, ids: Tensor, is_close: Any, edit: Callable[[HookedTransformer], None]
) -> None:
    expected = gpt2.run_with_hooks(
        ids, fwd_hooks=[("hook_embed", lambda x, hook: x * ~((ids >= 5) & (ids < 9))[..., None])]
    )
    edit(gpt2)
    assert is_close(gpt2(ids), expected)
    assert not gpt2.W_E[5:9].any() and gpt2.W_E[4].any()
    assert is_close(gpt2(ids), expected)


@pytest.mark.parametrize("family", hub.NAMES)
@pytest.mark.parametrize("flags", [{}, RAW], ids=["processed", "raw"])
def test_edit_that_is_undone_gives_the_first_logits(
    load: Any, ids: Tensor, is_close: Any, family: str, flags: dict
) -> None:
    model = load(family, **flags)
    before = model(ids)
    for weight in (model.W_E, model.W_U, model.blocks[1].attn.W_Q, model.blocks[0].attn.W_O, model.blocks[2].mlp.W_in):
        kept = weight.clone()
        weight[..., ::2] = 0
        assert not is_close(model(ids), before, 1e-3)
        weight.copy_(kept)
        assert is_close(model(ids), before, 1e-5)


def test_head_is_ablated_by_its_output_matrix(load: Any, ids: Tensor, is_close: Any) -> None:
    for family in hub.NAMES:
        model = load(family)
        no_head = [("blocks.1.attn.hook_z", lambda z, hook: z * (torch.arange(z.shape[2]) != 2)[:, None])]
        expected = model.run_with_hooks(ids, fwd_hooks=no_head)
        model.blocks[1].attn.W_O[2] = 0
        assert is_close(model(ids), expected), family


def test_grouped_keys_are_edited_under_their_own_name(load: Any, ids: Tensor, is_close: Any) -> None:
    model = load(LLAMA)
    scaled = model.run_with_hooks(
        ids, fwd_hooks=[("blocks.1.attn.hook_k", lambda k, hook: k * torch.tensor([0.0, 1.0])[:, None])]
    )
    model.blocks[1].attn._W_K.data[0] = 0
    assert is_close(model(ids), scaled)
    assert not model.blocks[1].attn.W_K[:2].any() and model.blocks[1].attn.W_K[2:].any()
    with pytest.raises(AttributeError, match="_W_K"):
        model.blocks[1].attn.W_K = torch.zeros(4, 96, 32)


def test_bias_that_the_checkpoint_lacks_comes_into_being(load: Any, ids: Tensor, is_close: Any) -> None:
    model = load(LLAMA)
    expected = model.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_attn_out", lambda x, hook: x + 0.5)])
    model.blocks[1].attn.b_O += 0.5
    assert is_close(model(ids), expected)
    model.b_U[7] += 3
    assert is_close(model(ids)[..., 7], expected[..., 7] + 3)


def test_bias_inside_a_gated_mlp_is_refused_once_and_only_if_it_is_not_zero(
    load: Any, unharmed: Any, ids: Tensor
) -> None:
    model = load(LLAMA)
    with unharmed(model):
        model.blocks[1].mlp.b_in += 1
        with pytest.raises(Refused, match="b_in"):
            model(ids)
        assert not model.blocks[1].mlp.b_in.any()
    model.blocks[1].mlp.b_in = torch.zeros(224)
    model(ids)


def test_weight_of_another_shape_is_refused(gpt2: HookedTransformer, unharmed: Any) -> None:
    with unharmed(gpt2), pytest.raises(BadInput, match=r"\[403, 128\], not \[3, 128\]"):
        gpt2.embed.W_E = torch.zeros(3, 128)


def test_edits_after_a_cast_take_effect(gpt2: HookedTransformer, ids: Tensor) -> None:
    held = gpt2.W_E
    gpt2.to(torch.bfloat16)
    assert gpt2.W_E is held and held.dtype == torch.bfloat16
    before = gpt2(ids)
    held[5:9] = 0
    assert not torch.equal(gpt2(ids), before)
    gpt2.to(torch.float32)
    assert held.dtype == torch.float32 and not held[5:9].any()


def test_edit_before_a_cast_is_not_lost(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.W_E[5:9] = 0
    gpt2.to(torch.bfloat16)
    assert not gpt2.W_E[5:9].any()
    embedded = gpt2.run_with_cache(ids)[1]["embed"]
    assert not embedded[(ids >= 5) & (ids < 9)].any()


def test_weight_taken_in_inference_mode_serves_training_and_edits(gpt2: HookedTransformer, ids: Tensor) -> None:
    with torch.inference_mode():
        unembed = gpt2.W_U
        gpt2.run_with_cache(ids)
    residual = gpt2(ids, stop_at_layer=3)
    (residual @ unembed).sum().backward()
    unembed[:, 3] = 0
    gpt2(ids)


# --- edits while a forward is under way -------------------------------------------------------------------------------


def test_edit_inside_a_hook_is_refused_and_dropped(gpt2: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    def edit(x: Tensor, hook: Any) -> None:
        gpt2.blocks[2].mlp.W_out.data.zero_()

    def edit_and_run(x: Tensor, hook: Any) -> None:
        edit(x, hook)
        gpt2(ids)

    for hook in (edit, edit_and_run):
        with unharmed(gpt2), pytest.raises(Refused, match="while a forward was under way"):
            gpt2.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_pre", hook)])
    with unharmed(gpt2), pytest.raises(Refused), gpt2.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", edit)]):
        gpt2.generate(ids, max_new_tokens=2, verbose=False)
    assert gpt2.blocks[2].mlp.W_out.any()


def test_weights_may_be_read_inside_a_hook(gpt2: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    def lens(x: Tensor, hook: Any) -> None:
        hook.ctx["logits"] = x @ gpt2.W_U

    with unharmed(gpt2):
        gpt2.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_pre", lens)])
        assert gpt2.hook_dict["blocks.0.hook_resid_pre"].ctx.pop("logits").shape == (2, 11, 403)


def test_key_value_cache_from_before_the_first_edit_is_refused(gpt2: HookedTransformer, ids: Tensor) -> None:
    past = HookedTransformerKeyValueCache.init_cache(gpt2.cfg, "cpu", len(ids))
    gpt2(ids[:, :5], past_kv_cache=past)
    gpt2.W_E[5:9] = 0
    with pytest.raises(Refused, match="before the first edit"):
        gpt2(ids[:, 5:], past_kv_cache=past)
    fresh = HookedTransformerKeyValueCache.init_cache(gpt2.cfg, "cpu", len(ids))
    gpt2(ids[:, :5], past_kv_cache=fresh)
    assert torch.allclose(gpt2(ids[:, 5:], past_kv_cache=fresh), gpt2(ids)[:, 5:], atol=1e-4)


# --- a model that somebody else owns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", LLAMA])
def test_edits_leave_the_users_own_module_unchanged(load: Any, ids: Tensor, family: str) -> None:
    theirs = hf_model(family)
    before, logits = {name: value.clone() for name, value in theirs.state_dict().items()}, theirs(ids).logits
    model = load(family, hf_model=theirs)
    model.W_E[5:9] = 0
    model.b_U[2] = 3
    edited = model(ids)
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
    assert torch.equal(theirs(ids).logits, logits)
    assert not torch.allclose(edited, centred(logits), atol=1e-2)
    assert not model.W_E[5:9].any()


def test_training_the_users_own_module_shows_in_the_weights(load: Any, ids: Tensor) -> None:
    theirs = hf_model("gpt2")
    model = load("gpt2", hf_model=theirs)
    held = model.W_E
    before = held.clone()
    with torch.no_grad():
        theirs.transformer.wte.weight[5:9] = 0
    assert model.W_E is held and not torch.equal(held, before)
    assert torch.allclose(model(ids), centred(theirs(ids).logits), atol=1e-4)


def test_adapter_is_trained_and_its_weights_show_but_are_not_edited(load: Any, unharmed: Any, ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    theirs = peft.get_peft_model(hf_model(LLAMA), options)
    model = load(LLAMA, hf_model=theirs)
    assert torch.allclose(model(ids), centred(theirs(ids).logits), atol=1e-4)
    before, trainable = model.W_Q.clone(), [p for p in model.parameters() if p.requires_grad]
    assert len(trainable) == 12
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    model(ids, return_type="loss").backward()
    optimizer.step()
    assert not torch.allclose(model.W_Q, before)
    assert torch.allclose(model(ids), centred(theirs(ids).logits), atol=1e-4)
    with unharmed(model):
        model.W_E[5:9] = 0
        with pytest.raises(Refused, match="merge_and_unload"):
            model(ids)
        assert model.W_E[5:9].any()


# --- training ---------------------------------------------------------------------------------------------------------

SHOWN = ("W_E", "W_U", "b_U", "W_Q", "W_K", "W_V", "W_O", "b_O", "b_V", "W_in", "W_out", "b_out")


def read_afresh(model: HookedTransformer) -> HookedTransformer:
    """A second model on a copy of the same parameters, which has shown nothing yet."""
    return HookedTransformer.from_pretrained(
        model.cfg.tokenizer_name, hf_model=copy.deepcopy(model.engine.model), device="cpu"
    )


def assert_shows_what_is_there(model: HookedTransformer, ids: Tensor) -> None:
    fresh = read_afresh(model)
    for name in SHOWN:
        assert torch.allclose(getattr(model, name), getattr(fresh, name), atol=1e-6), name
    _, cache = model.run_with_cache(ids)
    _, expected = fresh.run_with_cache(ids)
    for name in ("blocks.1.attn.hook_v", "blocks.1.attn.hook_z", "blocks.1.hook_attn_out", "hook_embed"):
        assert torch.allclose(cache[name], expected[name], atol=1e-5), name


@pytest.mark.parametrize("family", hub.NAMES)
def test_weights_are_not_stale_after_an_optimizers_step(load: Any, ids: Tensor, family: str) -> None:
    model = load(family)
    held, before = model.W_E, model.W_E.clone()
    model.run_with_cache(ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ids, return_type="loss")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model.W_E is held and (held - before).abs().max() > 1e-3
    assert_shows_what_is_there(model, ids)


@pytest.mark.parametrize("family", ["gpt2", LLAMA])
def test_steps_by_hand_through_data_show_after_a_forward(load: Any, ids: Tensor, family: str) -> None:
    model = load(family)
    model.W_E, model.W_Q, model.b_U
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    model(ids)
    assert_shows_what_is_there(model, ids)


def test_edit_after_a_step_is_an_edit_of_the_new_weight(gpt2: HookedTransformer, ids: Tensor, is_close: Any) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    gpt2(ids, return_type="loss").backward()
    optimizer.step()
    gpt2.W_E[5:9] *= 2
    stepped = gpt2.W_E.clone()
    gpt2(ids)
    assert is_close(gpt2.W_E, stepped)
    assert is_close(gpt2.run_with_cache(ids)[1]["embed"], stepped[ids])


def test_edit_and_step_of_one_weight_with_no_forward_between_are_refused(
    gpt2: HookedTransformer, unharmed: Any, ids: Tensor
) -> None:
    held, optimizer = gpt2.W_E, torch.optim.SGD(gpt2.parameters(), lr=0.1)
    gpt2(ids, return_type="loss").backward()
    held[5] = 0
    optimizer.step()
    with pytest.raises(BadInput, match="both changed"):
        gpt2(ids)
    with unharmed(gpt2):
        pass
    assert_shows_what_is_there(gpt2, ids)


def test_optimizer_from_before_the_first_edit_is_warned_about(
    gpt2: HookedTransformer, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    list(gpt2.parameters())
    gpt2.W_E[5:9] = 0
    with caplog.at_level(logging.WARNING):
        gpt2(ids)
    assert "an optimizer made before it" in caplog.text
    caplog.clear()
    gpt2.W_E[9] = 0
    gpt2(ids)
    assert caplog.text == ""


def test_edited_model_is_trained_on(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].attn.W_O[2] = 0
    gpt2(ids)
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    gpt2(ids, return_type="loss").backward()
    optimizer.step()
    assert gpt2.blocks[1].attn.W_O[2].any()
    kept = {name: getattr(gpt2, name).clone() for name in SHOWN}
    gpt2.W_E[300] += 1  # carried, together with everything trained
    gpt2(ids)
    assert all(torch.allclose(getattr(gpt2, name), value, atol=1e-6) for name, value in kept.items() if name != "W_E")


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", hub.NAMES)
def test_state_dict_of_one_model_makes_another_the_same(load: Any, ids: Tensor, is_close: Any, family: str) -> None:
    model, other = load(family), load(family)
    for block in model.blocks:
        block.attn.W_Q *= 0.9
        block.mlp.W_out *= 0.8
    result = other.load_state_dict(model.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert is_close(other(ids), model(ids))


def test_state_dict_is_a_copy_that_edits_do_not_reach(gpt2: HookedTransformer) -> None:
    weights = gpt2.state_dict()
    gpt2.W_E[5] = 0
    assert weights["embed.W_E"][5].any()
    weights["embed.W_E"][6] = 0
    assert gpt2.W_E[6].any()


def test_part_of_the_tree_has_a_state_dict_of_its_own(load: Any) -> None:
    """ARENA tests a student's layer against the model's by loading the layer's state dict."""
    model = load("gpt2", **RAW)
    assert set(model.ln_final.state_dict()) == {"w", "b"}
    assert {"attn.W_Q", "ln1.w", "mlp.W_in", "mlp.b_out"} <= set(model.blocks[0].state_dict())
    assert torch.equal(model.embed.state_dict()["W_E"], model.W_E)
    norm = nn.LayerNorm(128)
    norm.load_state_dict({"weight": model.ln_final.state_dict()["w"], "bias": model.ln_final.state_dict()["b"]})
    x = torch.randn(1, 3, 128)
    assert torch.allclose(norm(x), model.ln_final(x), atol=1e-5)


def test_state_dict_that_does_not_fit_is_refused_as_torch_does(gpt2: HookedTransformer, unharmed: Any) -> None:
    weights = gpt2.state_dict()
    with unharmed(gpt2):
        with pytest.raises(RuntimeError, match="Missing key.*embed.W_E"):
            gpt2.load_state_dict({})
        with pytest.raises(RuntimeError, match="Unexpected key.*blocks.0.attn.W_X"):
            gpt2.load_state_dict(weights | {"blocks.0.attn.W_X": torch.zeros(1)})
        with pytest.raises(RuntimeError, match=r"embed.W_E: embed is \[403, 128\], not \[3, 128\]"):
            gpt2.load_state_dict(weights | {"embed.W_E": torch.zeros(3, 128)})
        assert gpt2.load_state_dict({"embed.W_E": weights["embed.W_E"]}, strict=False).unexpected_keys == []
    buffers = {"blocks.0.attn.mask": torch.ones(2, 2), "blocks.0.attn.IGNORE": torch.tensor(0.0)}
    gpt2.load_state_dict(weights | buffers)
