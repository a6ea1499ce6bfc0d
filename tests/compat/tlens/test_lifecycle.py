"""A model over its life: hooks at several depths, training, freezing, casting, copying, and being let go of."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.tlens import HookedTransformer
from compat.tlens.hook_points import HookPoint
from engine.errors import Refused
from tests import hub

POINT, LATER = "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post"


def add(amount: float) -> Callable[[Tensor, HookPoint], Tensor]:
    return lambda x, hook: x + amount


def value(model: HookedTransformer, ids: Tensor) -> Tensor:
    """What flows on from POINT."""
    seen = {}
    with model.hooks(fwd_hooks=[(POINT, lambda x, hook: seen.update(x=x.clone()))]):
        model(ids, return_type=None)
    return seen["x"]


@pytest.fixture
def model(gpt2: HookedTransformer) -> HookedTransformer:
    return gpt2


@pytest.fixture
def plain(model: HookedTransformer, ids: Tensor) -> Tensor:
    return value(model, ids)


# --- hooks at several depths ------------------------------------------------------------------------------------------


def test_nested_contexts_take_off_what_is_theirs(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.add_hook(POINT, add(1))
    with model.hooks(fwd_hooks=[(POINT, add(10))]):
        assert is_close(value(model, ids), plain + 11)
        with model.hooks(fwd_hooks=[(POINT, add(100))]):
            assert model.context_level == 2
            assert is_close(value(model, ids), plain + 111)
        assert is_close(value(model, ids), plain + 11)
    assert model.context_level == 0
    assert is_close(value(model, ids), plain + 1)
    model.reset_hooks()
    assert torch.equal(value(model, ids), plain)


def test_error_inside_contexts_takes_all_of_them_off(model: HookedTransformer, ids: Tensor, plain: Tensor) -> None:
    with pytest.raises(ZeroDivisionError), model.hooks([(POINT, add(1))]), model.hooks([(POINT, add(2))]):
        raise ZeroDivisionError
    assert model.context_level == 0 and torch.equal(value(model, ids), plain)


def test_hooks_at_one_point_run_in_order_and_prepended_ones_first(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.add_hook(POINT, add(1))
    model.add_hook(POINT, lambda x, hook: x * 2)
    model.add_hook(POINT, lambda x, hook: x * 0, prepend=True)
    assert is_close(value(model, ids), torch.full_like(plain, 2.0))


def test_permanent_hooks_stay_until_they_are_meant(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.add_perma_hook(POINT, add(1))
    with model.hooks([(POINT, add(10))]):
        model.reset_hooks()
        assert is_close(value(model, ids), plain + 1)
    model.remove_all_hook_fns()
    assert is_close(value(model, ids), plain + 1)
    model.reset_hooks(including_permanent=True)
    assert torch.equal(value(model, ids), plain)


def test_hooks_stay_with_reset_hooks_end_off(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.run_with_hooks(ids, fwd_hooks=[(POINT, add(1))], reset_hooks_end=False)
    assert is_close(value(model, ids), plain + 1)
    model.reset_hooks()
    assert torch.equal(value(model, ids), plain)


def test_hooks_of_one_direction_or_level_are_taken_off_alone(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.add_hook(POINT, add(1), level=3)
    model.add_hook(POINT, lambda grad, hook: grad * 0, dir="bwd")
    model.reset_hooks(direction="bwd")
    assert not model.hook_dict[POINT].bwd_hooks and is_close(value(model, ids), plain + 1)
    model.reset_hooks(level=2)
    assert is_close(value(model, ids), plain + 1)
    model.reset_hooks(level=3)
    assert torch.equal(value(model, ids), plain)


def test_context_dictionary_lives_until_it_is_cleared(model: HookedTransformer, ids: Tensor) -> None:
    def count(x: Tensor, hook: HookPoint) -> None:
        hook.ctx["n"] = hook.ctx.get("n", 0) + 1

    for _ in range(2):
        model.run_with_hooks(ids, fwd_hooks=[(POINT, count)])
    assert model.hook_dict[POINT].ctx == {"n": 2}
    model.run_with_hooks(ids, fwd_hooks=[(POINT, count)], clear_contexts=True)
    assert model.hook_dict[POINT].ctx == {}
    model.run_with_hooks(ids, fwd_hooks=[(POINT, count)])
    model.clear_contexts()
    assert model.hook_dict[POINT].ctx == {}


@pytest.mark.parametrize("family", hub.NAMES)
def test_cache_holds_what_hooks_made_of_the_values(
    shared: Any, unharmed: Any, ids: Tensor, is_close: Any, family: str
) -> None:
    model = shared(family)
    with unharmed(model):
        for hooks in (add(1), lambda x, hook: x.add_(1)):
            _, before = model.run_with_cache(ids)
            with model.hooks([(POINT, hooks)]):
                _, cache = model.run_with_cache(ids)
            assert is_close(cache[POINT], before[POINT] + 1)
            assert not is_close(cache[LATER], before[LATER])
            assert torch.equal(cache["blocks.0.hook_resid_pre"], before["blocks.0.hook_resid_pre"])


def test_caching_hooks_added_by_hand_fill_one_dictionary(model: HookedTransformer, ids: Tensor, plain: Tensor) -> None:
    cache = model.add_caching_hooks([POINT])
    model(ids)
    assert list(cache) == [POINT] and torch.equal(cache[POINT], plain)
    model(ids[:, :4])
    assert cache[POINT].shape[1] == 4
    model.reset_hooks()
    assert not model.list_hooks() and not model.is_caching


def test_hooks_put_on_a_hook_point_itself_are_those_of_the_model(
    model: HookedTransformer, ids: Tensor, plain: Tensor, is_close: Any
) -> None:
    model.blocks[1].hook_resid_pre.add_hook(add(1))
    assert list(model.list_hooks()) == [POINT] and is_close(value(model, ids), plain + 1)
    model.blocks[1].hook_resid_pre.remove_hooks()
    assert not model.list_hooks()


# --- training and freezing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", hub.NAMES)
def test_training_mode_brings_no_dropout(load: Any, ids: Tensor, family: str) -> None:
    model = load(family)
    before = model(ids)
    assert model.train() is model and model.training
    assert torch.equal(model(ids), before)
    assert not model.eval().training


def test_dropout_of_the_checkpoint_stays_off(load: Any, ids: Tensor) -> None:
    """GPT-2's own dropout is 0.1."""
    model = load("gpt2")
    assert model.engine.model.config.resid_pdrop > 0
    model.train()
    assert torch.equal(model(ids), model(ids))


def test_gradients_are_on_by_default_and_follow_torchs_switches(model: HookedTransformer, ids: Tensor) -> None:
    assert model(ids).requires_grad and all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        assert not model(ids).requires_grad
    with torch.inference_mode():
        assert model(ids).is_inference()
    assert model.requires_grad_(False) is model
    assert not model(ids).requires_grad
    model.requires_grad_(True)
    model(ids, return_type="loss").backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_are_the_checkpoints_own(model: HookedTransformer) -> None:
    """Fewer than TransformerLens' own: a tied unembedding once, no bias of zeros. `n_params_total` counts like it."""
    own = dict(model.engine.model.named_parameters())
    assert dict(model.named_parameters()) == own
    assert len(list(model.parameters())) == len(own) == 40
    assert sum(parameter.numel() for parameter in model.parameters()) == 655_872
    assert model.n_params_total == 706_067


def test_part_of_the_tree_says_that_it_has_no_parameters_of_its_own(model: HookedTransformer) -> None:
    for part in (model.blocks, model.blocks[0], model.blocks[0].attn, model.blocks[0].mlp, model.embed, model.unembed):
        with pytest.raises(Refused, match="named_parameters"):
            list(part.parameters())
        with pytest.raises(Refused):
            part.requires_grad_(False)
    assert list(model.ln_final.parameters()) == []  # folded, as in TransformerLens


def test_fine_tuning_lowers_the_loss(model: HookedTransformer, ids: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(ids, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


def test_part_of_the_model_is_trained_by_name(model: HookedTransformer, ids: Tensor) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    attention, mlp = model.W_Q.clone(), model.blocks[1].mlp.b_out.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(ids, return_type="loss").backward()
    optimizer.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and all(".mlp." in name for name in changed)
    assert torch.equal(model.W_Q, attention) and not torch.equal(model.blocks[1].mlp.b_out, mlp)


def test_module_that_holds_a_model_trains_casts_and_saves_it(load: Any, ids: Tensor) -> None:
    host = nn.ModuleDict({"lens": load("gpt2"), "head": nn.Linear(128, 2)})
    lens = host["lens"]
    assert "lens.transformer.wte.weight" in dict(host.named_parameters())
    before, held = lens.W_E.clone(), lens.W_E
    optimizer = torch.optim.SGD(host.parameters(), lr=0.5)
    host["head"](lens(ids, stop_at_layer=2)).pow(2).sum().backward()
    optimizer.step()
    assert lens.W_E is held and not torch.equal(held, before)
    assert {"lens.embed.W_E", "lens.blocks.0.attn.W_Q", "head.weight"} <= set(host.state_dict())
    assert not any("transformer" in name for name in host.state_dict())
    host.to(torch.bfloat16)
    assert lens.cfg.dtype == lens(ids).dtype == torch.bfloat16
    result = host.load_state_dict(host.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])


def test_vector_of_all_parameters_goes_out_and_in(model: HookedTransformer, ids: Tensor) -> None:
    before, embedding = model(ids), model.W_E.clone()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
    changed = model(ids)
    assert not torch.allclose(changed, before, atol=1e-2) and torch.allclose(model.W_E, embedding * 0.9, atol=1e-6)
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert torch.equal(model(ids), before) and torch.equal(model.W_E, embedding)


# --- casting and moving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "google/gemma-2-2b"])
def test_cast_changes_the_model_its_weights_and_its_config(load: Any, ids: Tensor, family: str) -> None:
    model = load(family)
    exact = model(ids)
    for cast, dtype in (
        (lambda: model.to(torch.bfloat16), torch.bfloat16),
        (lambda: model.float(), torch.float32),
        (lambda: model.half(), torch.float16),
        (lambda: model.double(), torch.float64),
        (lambda: model.to(torch.float32), torch.float32),
    ):
        assert cast() is model
        assert model.cfg.dtype == model.W_E.dtype == model.W_Q.dtype == dtype
        out, cache = model.run_with_cache(ids)
        assert out.dtype == cache["blocks.1.attn.hook_v"].dtype == dtype
        assert model.ln_final(torch.ones(1, 2, model.cfg.d_model, dtype=dtype)).dtype == dtype
        assert model.blocks[1](torch.ones(1, 2, model.cfg.d_model, dtype=dtype)).dtype == dtype
        assert (out.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_model_moves_to_where_it_is(model: HookedTransformer, ids: Tensor) -> None:
    before = model(ids)
    for move in (lambda: model.to("cpu"), lambda: model.to(torch.device("cpu")), model.cpu):
        assert move() is model and torch.device(model.cfg.device).type == "cpu"
    model.move_model_modules_to_device()
    assert torch.equal(model(ids), before)
    assert next(model.parameters()).device.type == "cpu"


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", hub.NAMES)
def test_copy_is_a_model_of_its_own(shared: Any, unharmed: Any, ids: Tensor, family: str) -> None:
    model = shared(family)
    with unharmed(model):
        copied = copy.deepcopy(model)
        assert torch.equal(copied(ids), model(ids))
        copied.add_hook(POINT, add(1))
        copied.W_E[5:9] = 0
        copied.blocks[1].mlp.W_out *= 2
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        with torch.enable_grad():
            copied(ids, return_type="loss").backward()
        optimizer.step()
        copied.to(torch.bfloat16)
        assert copied.blocks[1](torch.ones(1, 3, model.cfg.d_model, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert model.W_E[5:9].any() and model.cfg.dtype == torch.float32


def test_copy_keeps_edits_and_hooks_of_its_own(model: HookedTransformer, ids: Tensor, is_close: Any) -> None:
    model.W_E[5:9] = 0
    model.add_hook(POINT, lambda x, hook: x.roll(1, -1))
    hooked, copied = model(ids), copy.deepcopy(model)
    assert is_close(copied(ids), hooked)
    copied.reset_hooks()
    assert not is_close(copied(ids), hooked, 1e-3) and torch.equal(model(ids), hooked)


def test_model_goes_through_pickle_and_torch_save(model: HookedTransformer, ids: Tensor, tmp_path: Path) -> None:
    before = model(ids)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), before)
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(ids), before)


# --- being let go of --------------------------------------------------------------------------------------------------


def test_deleted_model_is_freed(load: Any, ids: Tensor) -> None:
    model = load("gpt2")
    model.W_E, model.W_Q
    model.run_with_cache(ids)
    model.generate(ids, max_new_tokens=2, verbose=False)
    model(ids, return_type="loss").backward()
    kept = [weakref.ref(model), weakref.ref(model.engine.model), weakref.ref(model.blocks[1].attn)]
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_abandoned_stream_leaves_nothing_behind(model: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    with unharmed(model):
        stream = model.generate_stream(ids, max_new_tokens=5, max_tokens_per_yield=1, verbose=False)
        next(stream)
        del stream
    model.W_E[5] = 0
    model(ids)


def test_many_forwards_do_not_gather_objects_or_memory(model: HookedTransformer, ids: Tensor) -> None:
    def work() -> None:
        with torch.no_grad():
            model.run_with_hooks(ids, fwd_hooks=[(POINT, add(1))])
            model.run_with_cache(ids, names_filter=POINT)

    def held() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(type(each) is Tensor for each in objects)
        return len(objects), tensors

    for _ in range(10):
        work()
    before = held()
    for _ in range(150):
        work()
    after = held()
    assert after[0] - before[0] < 100 and after[1] <= before[1]
