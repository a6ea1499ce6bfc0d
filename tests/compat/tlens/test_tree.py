"""The tree of a model: names, objects, printing, and what is served or refused when a program changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.tlens import HookedTransformer, components
from compat.tlens.hook_points import HookPoint
from engine.errors import Refused
from mappers import tlens as mapper
from tests import hub


@pytest.mark.parametrize("family", hub.NAMES)
def test_every_name_of_the_mapper_is_a_hook_point_of_the_tree_and_the_other_way_round(shared: Any, family: str) -> None:
    model = shared(family)
    assert set(model.hook_dict) == set(mapper.names(model.engine.facts))
    assert all(model.get_submodule(name) is point and point.name == name for name, point in model.hook_dict.items())
    assert model.mod_dict.keys() >= model.hook_dict.keys() | {"blocks.1.attn", "blocks.1", "blocks", "embed"}
    assert list(model.hook_points()) == list(model.hook_dict.values())


def test_printing_shows_the_tree_and_the_hooks_on_it(gpt2: HookedTransformer) -> None:
    gpt2.add_hook("blocks.1.attn.hook_z", lambda x, hook: None)
    text = repr(gpt2)
    for part in ("(blocks)", "(attn): Attention(", "(hook_z): HookPoint(name='blocks.1.attn.hook_z', 1 fwd)", "(unembed): Unembed("):
        assert part in text
    assert "tensor(" not in text


def test_tree_shows_no_module_of_the_engine(gpt2: HookedTransformer) -> None:
    assert all(type(module).__module__.startswith(("compat.", "torch.")) for module in gpt2.modules())
    assert not list(gpt2.buffers())


def test_blocks_can_be_walked_sliced_and_counted(gpt2: HookedTransformer) -> None:
    assert isinstance(gpt2.blocks, nn.ModuleList) and len(gpt2.blocks) == gpt2.cfg.n_layers
    assert [block.layer_index for block in gpt2.blocks[1:]] == [1, 2]
    assert gpt2.blocks[-1].attn.hook_z.layer() == 2


def test_only_what_is_live_is_tapped(gpt2: HookedTransformer, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run = gpt2.engine.run
    monkeypatch.setattr(gpt2.engine, "run", lambda batch, taps, **options: (asked.append(len(list(taps))), run(batch, taps, **options))[1])
    gpt2(ids)
    gpt2.run_with_cache(ids, names_filter="blocks.1.hook_resid_post")
    assert asked == [0, 1]


# --- refused, never ignored -------------------------------------------------------------------------------------------


def replace_norm(model: HookedTransformer) -> None:
    model.blocks[1].ln1 = nn.Identity()


def swap_norms(model: HookedTransformer) -> None:
    model.blocks[1].ln1 = model.blocks[2].ln1


def ln2_for_ln1(model: HookedTransformer) -> None:
    model.blocks[1].ln1 = model.blocks[1].ln2


def replace_last_norm(model: HookedTransformer) -> None:
    model.ln_final = nn.LayerNorm(model.cfg.d_model)


def patch_norm(model: HookedTransformer) -> None:
    model.ln_final.forward = lambda x: x


def hook_norm(model: HookedTransformer) -> None:
    model.blocks[0].ln2.register_forward_hook(lambda module, inputs, out: None)


def drop_blocks(model: HookedTransformer) -> None:
    model.blocks = model.blocks[:2]


def delete_block(model: HookedTransformer) -> None:
    del model.blocks[1]


def append_block(model: HookedTransformer) -> None:
    model.blocks.append(model.blocks[0])


def backward_hook_on_block(model: HookedTransformer) -> None:
    model.blocks[1].register_full_backward_hook(lambda module, grad_in, grad_out: None)


def backward_pre_hook_on_mlp(model: HookedTransformer) -> None:
    model.blocks[1].mlp.register_full_backward_pre_hook(lambda module, grad_out: None)


def pre_hook_on_attention(model: HookedTransformer) -> None:
    model.blocks[1].attn.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)


@pytest.mark.parametrize(
    "change",
    [
        replace_norm,
        swap_norms,
        ln2_for_ln1,
        replace_last_norm,
        patch_norm,
        hook_norm,
        drop_blocks,
        delete_block,
        append_block,
        backward_hook_on_block,
        backward_pre_hook_on_mlp,
        pre_hook_on_attention,
    ],
    ids=lambda change: change.__name__,
)
def test_change_that_cannot_be_served_is_refused(gpt2: HookedTransformer, ids: Tensor, change: Callable[[HookedTransformer], None]) -> None:
    change(gpt2)
    for run in (gpt2, gpt2.run_with_cache, lambda ids: gpt2.generate(ids, max_new_tokens=1, verbose=False)):
        with pytest.raises(Refused):
            run(ids)


@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_changed_norm_of_queries_or_keys_is_refused(load: Any, ids: Tensor, norm: str) -> None:
    model = load("Qwen/Qwen3-0.6B")
    handle = getattr(model.blocks[1].attn, norm).register_forward_hook(lambda module, inputs, out: out * 2)
    with pytest.raises(Refused, match=norm):
        model(ids)
    handle.remove()
    model(ids)
    setattr(model.blocks[1].attn, norm, nn.Identity())
    with pytest.raises(Refused, match=norm):
        model(ids)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [("blocks.1.mlp", "act_fn", nn.ReLU()), ("blocks.1.attn", "attn_scale", 1.0), ("blocks.1.attn", "attn_type", "local"), ("blocks.1.ln1", "eps", 0.1)],
)
def test_attribute_that_would_change_nothing_cannot_be_set(gpt2: HookedTransformer, module: str, name: str, value: Any) -> None:
    with pytest.raises(AttributeError):
        setattr(gpt2.get_submodule(module), name, value)


def test_attention_mask_of_a_layer_cannot_be_set_but_may_be_shared(gpt2: HookedTransformer) -> None:
    gpt2.blocks[1].attn.mask = gpt2.blocks[0].attn.mask  # circuit-tracer shares them to save memory
    with pytest.raises(Refused):
        gpt2.blocks[1].attn.mask = torch.ones(72, 72, dtype=torch.bool)


def test_replaced_attention_with_an_input_a_head_is_refused(gpt2: HookedTransformer, ids: Tensor) -> None:
    class Zero(nn.Module):
        def forward(self, query_input: Tensor, **inputs: Any) -> Tensor:
            return torch.zeros_like(query_input)

    gpt2.blocks[1].attn = Zero()
    gpt2(ids)
    gpt2.set_use_split_qkv_input(True)
    with pytest.raises(Refused, match="use_split_qkv_input"):
        gpt2(ids)


def test_module_is_put_back(gpt2: HookedTransformer, ids: Tensor) -> None:
    before, mlp, point = gpt2(ids), gpt2.blocks[1].mlp, gpt2.blocks[1].hook_resid_mid
    gpt2.blocks[1].mlp, gpt2.blocks[1].hook_resid_mid = nn.Identity(), nn.ReLU()
    assert not torch.allclose(gpt2(ids), before)
    gpt2.blocks[1].mlp, gpt2.blocks[1].hook_resid_mid = mlp, point
    assert torch.equal(gpt2(ids), before)


def test_hook_point_of_the_users_own_stays_silent_until_something_calls_it(gpt2: HookedTransformer, ids: Tensor) -> None:
    gpt2.blocks[1].mine = HookPoint()
    gpt2.setup()
    assert "blocks.1.mine" in gpt2.hook_dict
    assert "blocks.1.mine" not in gpt2.run_with_cache(ids)[1]
    hook = ("blocks.1.hook_resid_post", lambda x, hook: gpt2.blocks[1].mine(x))
    with gpt2.hooks(fwd_hooks=[hook]):
        _, cache = gpt2.run_with_cache(ids)
    assert torch.equal(cache["blocks.1.mine"], cache["blocks.1.hook_resid_post"])


def test_classes_of_components_are_those_of_the_tree(shared: Any) -> None:
    grouped = shared("google/gemma-2-2b").blocks[0]
    assert type(grouped.attn) is components.GroupedQueryAttention and type(grouped.mlp) is components.GatedMLP
    assert type(grouped.ln1) is components.RMSNormPre and type(grouped.ln1_post) is components.RMSNorm
