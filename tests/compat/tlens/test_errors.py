"""Bad input gets an error that says what and where, and leaves the model usable and free of hooks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compat.tlens import HookedTransformer, HookedTransformerKeyValueCache
from engine.errors import BadInput, BadReplacement, CompatError, Refused, UnknownName

POINT = "blocks.1.hook_resid_post"


def nothing(x: Tensor, hook: Any) -> None:
    return None


@pytest.fixture
def model(shared: Callable[[str], HookedTransformer]) -> HookedTransformer:
    return shared("gpt2")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", ["blocks.1.hook_resid_pots", "blocks.1.resid_post", "blocks.7.hook_resid_post"])
def test_unknown_name_is_a_key_error_with_the_nearest_names(model: HookedTransformer, unharmed: Any, ids: Tensor, typed: str) -> None:
    attempts = (
        lambda: model.run_with_hooks(ids, fwd_hooks=[(POINT, nothing), (typed, nothing)]),
        lambda: model.run_with_hooks(ids, return_type="loss", bwd_hooks=[(typed, nothing)]),
        lambda: model.add_hook(typed, nothing),
        lambda: model.add_perma_hook(typed, nothing),
    )
    for attempt in attempts:
        with unharmed(model), pytest.raises(KeyError) as caught:
            attempt()
        assert isinstance(caught.value, UnknownName)
        assert typed in str(caught.value) and "hook_resid_post'" in str(caught.value)


def test_hook_on_a_module_that_is_no_hook_point_is_refused(model: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    for attempt in (lambda: model.add_hook("blocks.1.attn", nothing), lambda: model.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn", nothing)])):
        with unharmed(model), pytest.raises(AssertionError, match=r"blocks\.1\.attn.*Attention"):
            attempt()


@pytest.mark.parametrize("name", ["attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in", "hook_attn_in"])
def test_hook_by_name_on_a_switched_off_point_is_refused(model: HookedTransformer, unharmed: Any, ids: Tensor, name: str) -> None:
    name = f"blocks.1.{name}"
    attempts = (
        lambda: model.add_hook(name, nothing),
        lambda: model.add_hook(lambda each: each == name, nothing),
        lambda: model.run_with_hooks(ids, fwd_hooks=[(name, nothing)]),
    )
    for attempt in attempts:
        with unharmed(model), pytest.raises(AssertionError, match=f"{name} if use_.* is False"):
            attempt()


# --- hooks that go wrong ----------------------------------------------------------------------------------------------

EVERYWHERE = (
    *("hook_embed", "hook_pos_embed", "blocks.0.hook_resid_pre", "blocks.1.ln1.hook_scale", "blocks.1.attn.hook_q"),
    *("blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_z", "blocks.1.hook_resid_mid"),
    *("blocks.1.mlp.hook_post", "ln_final.hook_normalized", "unembed.hook_in", "unembed.hook_out"),
)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_error_in_a_hook_comes_out_as_it_is_with_the_users_line(model: HookedTransformer, unharmed: Any, ids: Tensor, name: str) -> None:
    mine = RuntimeError("mine")

    def breaks(x: Tensor, hook: Any) -> None:
        raise mine

    for run in (model.run_with_hooks, model.run_with_cache):
        with unharmed(model), pytest.raises(RuntimeError) as caught, model.hooks(fwd_hooks=[(name, breaks)]):
            run(ids)
        assert caught.value is mine
        assert "breaks" in [frame.name for frame in traceback.extract_tb(mine.__traceback__)]
        mine.__traceback__ = None


@pytest.mark.parametrize("name", EVERYWHERE)
def test_interrupt_in_the_middle_of_a_forward_or_a_generation_leaves_nothing(
    model: HookedTransformer, unharmed: Any, ids: Tensor, name: str
) -> None:
    def interrupt(x: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    with unharmed(model), pytest.raises(KeyboardInterrupt):
        model.run_with_hooks(ids, fwd_hooks=[(name, interrupt)])
    if name != "hook_embed":  # silent in generate
        with unharmed(model), pytest.raises(KeyboardInterrupt), model.hooks(fwd_hooks=[(name, interrupt)]):
            model.generate(ids, max_new_tokens=2, verbose=False)


def test_error_in_a_backward_hook_comes_out_as_it_is(model: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    mine = ZeroDivisionError("mine")

    def breaks(grad: Tensor, hook: Any) -> None:
        raise mine

    with unharmed(model), torch.enable_grad(), pytest.raises(ZeroDivisionError) as caught, model.hooks(bwd_hooks=[(POINT, breaks)]):
        model(ids, return_type="loss").backward()
    assert caught.value is mine


def test_error_in_a_names_filter_comes_out_as_it_is(model: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    with unharmed(model), pytest.raises(ZeroDivisionError):
        model.run_with_cache(ids, names_filter=lambda name: 1 / 0)


@pytest.mark.parametrize("name", ["hook_embed", "blocks.1.attn.hook_q", "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_z", POINT, "unembed.hook_out"])
@pytest.mark.parametrize(
    ("replace", "got"),
    [
        (lambda x: x[:, :1], "[2, 1"),
        (lambda x: x[:1], "[1, "),
        (lambda x: x.double(), "float64"),
        (lambda x: x.half(), "float16"),
        (lambda x: 3.0, "float"),
        (lambda x: (x,), "tuple"),
        (lambda x: x.detach().numpy(), "ndarray"),
    ],
    ids=["position", "batch", "double", "half", "number", "tuple", "array"],
)
def test_replacement_that_cannot_stand_in_names_the_point_what_came_and_what_was_due(
    model: HookedTransformer, unharmed: Any, ids: Tensor, name: str, replace: Callable[[Tensor], Any], got: str
) -> None:
    due = model.run_with_cache(ids, names_filter=name)[1][name]
    with unharmed(model), pytest.raises(BadReplacement) as caught:
        model.run_with_hooks(ids, fwd_hooks=[(name, lambda x, hook: replace(x))])
    for part in (name, got, str(list(due.shape)), "float32"):
        assert part in str(caught.value)


# --- input ------------------------------------------------------------------------------------------------------------

WHOLE = dict(dtype=torch.long)
BAD_IDS = {
    "beyond the vocabulary": (torch.tensor([[1, 2], [3, 403]]), IndexError, "403, at row 1, position 1"),
    "negative": (torch.tensor([[-1, 4]]), IndexError, "-1, at row 0, position 0"),
    "longer than n_ctx": (torch.zeros(1, 73, **WHOLE), ValueError, "73 positions, but gpt2 has n_ctx = 72"),
    "floats": (torch.rand(2, 3), ValueError, "must be integers, not torch.float32"),
    "booleans": (torch.ones(2, 3, dtype=torch.bool), ValueError, "must be integers, not torch.bool"),
    "no position": (torch.zeros(1, 0, **WHOLE), ValueError, r"got \[1, 0\]"),
    "no row": (torch.zeros(0, 4, **WHOLE), ValueError, r"got \[0, 4\]"),
    "a number": (torch.tensor(3), ValueError, r"got \[\]"),
    "three axes": (torch.zeros(1, 2, 3, **WHOLE), ValueError, r"got \[1, 2, 3\]"),
    "no texts": ([], AssertionError, "empty list"),
    "nothing": (None, AssertionError, "not NoneType"),
    "an integer": (5, AssertionError, "not int"),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_input_that_is_no_prompt_is_refused(model: HookedTransformer, unharmed: Any, kind: str) -> None:
    bad, builtin, message = BAD_IDS[kind]
    for run in (model, model.run_with_cache, lambda x: model(x, stop_at_layer=1)):
        with unharmed(model), pytest.raises(builtin, match=message) as caught:
            run(bad)
        assert isinstance(caught.value, BadInput)


def test_empty_text_without_bos_is_refused(model: HookedTransformer, unharmed: Any) -> None:
    with unharmed(model), pytest.raises(BadInput, match=r"\[1, 0\]"):
        model("", prepend_bos=False)


@pytest.mark.parametrize("family", ["gpt2", "meta-llama/Llama-3.2-1B"])
@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_generation_ends_at_n_ctx_with_an_error(
    shared: Any, unharmed: Any, family: str, use_past_kv_cache: bool
) -> None:
    model = shared(family)
    prompt = torch.ones(1, model.cfg.n_ctx - 2, dtype=torch.long)
    options = dict(do_sample=False, verbose=False, stop_at_eos=False, use_past_kv_cache=use_past_kv_cache)
    with unharmed(model):
        assert model.generate(prompt, max_new_tokens=3, **options).shape == (1, model.cfg.n_ctx + 1)
        with pytest.raises(BadInput, match=f"n_ctx = {model.cfg.n_ctx}"):
            model.generate(prompt, max_new_tokens=4, **options)


@pytest.mark.parametrize("shape", [(2, 5), (11,), (2, 11, 11), (1, 11)])
def test_mask_of_another_shape_than_the_tokens_is_refused(model: HookedTransformer, unharmed: Any, ids: Tensor, shape: tuple[int, ...]) -> None:
    with unharmed(model), pytest.raises(AssertionError, match="does not match tokens shape"):
        model(ids, attention_mask=torch.ones(shape))


@pytest.mark.parametrize(
    "bad",
    [torch.arange(4)[None], torch.randn(1, 3, 100), torch.randn(3, 128), torch.randn(1, 3, 128).double(), torch.randn(1, 73, 128), "text"],
    ids=["ids", "width", "axes", "dtype", "length", "text"],
)
def test_start_at_layer_takes_a_residual_only(model: HookedTransformer, unharmed: Any, bad: Any) -> None:
    with unharmed(model), pytest.raises(BadInput, match="residual"):
        model(bad, start_at_layer=1)


@pytest.mark.parametrize("layer", ["a", 1.5])
def test_layer_that_is_no_whole_number_is_a_type_error(model: HookedTransformer, unharmed: Any, ids: Tensor, layer: Any) -> None:
    with unharmed(model), pytest.raises(TypeError):
        model(ids, stop_at_layer=layer)


def test_loss_without_tokens_is_refused(model: HookedTransformer, unharmed: Any) -> None:
    with unharmed(model), pytest.raises(AssertionError, match="tokens must be passed"):
        model(torch.randn(1, 3, 128), start_at_layer=1, return_type="loss")


def test_failed_run_does_not_leave_a_key_value_cache_that_gives_other_numbers(model: HookedTransformer, unharmed: Any, ids: Tensor) -> None:
    def breaks(x: Tensor, hook: Any) -> None:
        raise ZeroDivisionError

    with unharmed(model):
        past = HookedTransformerKeyValueCache.init_cache(model.cfg, "cpu", len(ids))
        model(ids[:, :5], past_kv_cache=past)
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(ids[:, 5:], past_kv_cache=past, fwd_hooks=[(POINT, breaks)])
        with pytest.raises(CompatError):
            model(ids[:, 5:], past_kv_cache=past)


# --- switches and fields ----------------------------------------------------------------------------------------------


def test_attn_in_of_grouped_queries_is_refused(shared: Any, unharmed: Any) -> None:
    model = shared("meta-llama/Llama-3.2-1B")
    with unharmed(model), pytest.raises(AssertionError, match="GroupedQueryAttention"):
        model.set_use_attn_in(True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_layers", 2), ("parallel_attn_mlp", True), ("attn_only", True), ("attn_scores_soft_cap", 5.0), ("act_fn", "relu")],
)
def test_field_of_cfg_that_says_how_to_compute_cannot_be_changed_unnoticed(
    model: HookedTransformer, unharmed: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor, field: str, value: Any
) -> None:
    with unharmed(model), monkeypatch.context() as patch:
        patch.setattr(model.cfg, field, value)
        for run in (model, lambda ids: model.generate(ids, max_new_tokens=1, verbose=False)):
            with pytest.raises(Refused, match=rf"cfg\.{field}"):
                run(ids)


def test_ungrouping_on_cfg_is_refused_where_it_would_show(shared: Any, unharmed: Any, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = shared("meta-llama/Llama-3.2-1B")
    with unharmed(model), monkeypatch.context() as patch:
        patch.setattr(model.cfg, "ungroup_grouped_query_attention", True)
        with pytest.raises(Refused, match="ungrouped"):
            model(ids)
