"""Every method of our `ActivationCache` against TransformerLens' own, over one run of a real model of theirs.

Each model is tiny and random, every parameter perturbed; both caches wrap the same tensors and the same model, so all
that can differ is the method. Values agree to TOLERANCE of the largest, labels, shapes and dtypes exactly, and where
the real library raises, ours raises that class or a subclass of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_lens import ActivationCache as RealCache
from transformer_lens import HookedTransformer, HookedTransformerConfig

from compat.tlens.ActivationCache import ActivationCache
from tests.reference import reference_model

TOLERANCE = 1e-6  # of the largest magnitude
N_LAYERS, BATCH, POS, D_MODEL, D_MLP, D_VOCAB = 3, 2, 5, 24, 36, 97
SIZES = {
    "n_layers": N_LAYERS, "d_model": D_MODEL, "d_head": 6, "n_heads": 5, "d_mlp": D_MLP, "d_vocab": D_VOCAB,
    "n_ctx": 17, "act_fn": "gelu", "seed": 0, "device": "cpu", "init_weights": True,
}  # fmt: skip
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 6}
MODELS: dict[str, dict[str, Any]] = {
    "LN": {"normalization_type": "LN"},
    "LNPre": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", **ROTARY},
    "RMSPre": {"normalization_type": "RMSPre", "gated_mlp": True, **ROTARY},
    "grouped": {"normalization_type": "RMS", "n_heads": 6, "n_key_value_heads": 2, **ROTARY},
    "parallel": {"normalization_type": "LN", "parallel_attn_mlp": True, **ROTARY},
    "post-norms": {"normalization_type": "RMS", "use_normalization_before_and_after": True, **ROTARY},
    "no norms": {"normalization_type": None},
    "attention only": {"normalization_type": "LN", "attn_only": True},
    "head results": {"normalization_type": "LN", "use_attn_result": True},
    "half": {"normalization_type": "LN", "dtype": torch.bfloat16},
}


def tiny_model(name: str) -> Any:
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, **MODELS[name]}))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=noise).to(parameter.dtype)
    return model


# (model, whether its activations have a batch axis)
CASES = [(name, True) for name in MODELS] + [(name, False) for name in ("LN", "RMS", "head results")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0] + ("" if case[1] else ", one item"))
def case(request: pytest.FixtureRequest) -> tuple[str, bool]:
    return request.param


@pytest.fixture(scope="module")
def model(case: tuple[str, bool]) -> Any:
    return tiny_model(case[0])


@pytest.fixture(scope="module")
def kept(case: tuple[str, bool], model: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """The activations of one run, and whether they have a batch axis."""
    tokens = torch.randint(0, D_VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        if case[1]:
            return model.run_with_cache(tokens)[1].cache_dict, True
        return model.run_with_cache(tokens[:1], remove_batch_dim=True)[1].cache_dict, False


def pair_of(model: Any, kept: tuple[dict[str, torch.Tensor], bool]) -> tuple[Any, Any]:
    return tuple(kind(dict(kept[0]), model, has_batch_dim=kept[1]) for kind in (RealCache, ActivationCache))


def outcome(act: Callable[[], Any]) -> Any:
    try:
        with torch.no_grad():
            return act()
    except Exception as error:
        return error


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), (found, expected)
    elif isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        if not torch.equal(found, expected):
            assert expected.isfinite().all()
            # one step of a half-precision format is all that its own rounding leaves to compare
            share = TOLERANCE if expected.dtype == torch.float32 else torch.finfo(expected.dtype).eps
            assert (found - expected).abs().max() <= share * expected.abs().max()
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple) and len(found) == len(expected)
        for mine, theirs in zip(found, expected):
            assert_same(mine, theirs)
    else:
        assert found == expected


def assert_same_calls(model: Any, kept: Any, method: str, calls: list[dict[str, Any]]) -> None:
    for arguments in calls:
        expected, found = (outcome(lambda: getattr(cache, method)(**arguments)) for cache in pair_of(model, kept))
        try:
            assert_same(found, expected)
        except AssertionError as error:
            raise AssertionError(f"{method}({arguments})") from error


def each(**choices: list[Any]) -> list[dict[str, Any]]:
    """All combinations, one argument away from the first choices at a time, and all second choices together."""
    plain = {name: values[0] for name, values in choices.items()}
    single = [plain | {name: value} for name, values in choices.items() for value in values[1:]]
    return [plain, *single, {name: values[1] for name, values in choices.items()}]


LAYERS = [None, 2, 0, N_LAYERS + 1]
POSITIONS = [None, -1, (1, 4), [0, 3]]
FLAG = [False, True]
ONE, TWO = torch.linspace(-1, 2, D_MODEL), torch.linspace(-1, 2, 3 * D_MODEL).view(D_MODEL, 3).sin()


def in_dtype(model: Any, projection: torch.Tensor | None) -> torch.Tensor | None:
    return projection if projection is None else projection.to(model.cfg.dtype)


def test_accumulated_resid_is_the_same(model: Any, kept: Any) -> None:
    calls = each(layer=LAYERS, incl_mid=FLAG, apply_ln=FLAG, pos_slice=POSITIONS, mlp_input=FLAG, return_labels=FLAG)
    calls += each(layer=LAYERS, pos_slice=POSITIONS, apply_ln=[True, True], mlp_input=FLAG)
    assert_same_calls(model, kept, "accumulated_resid", calls)


def test_decompose_resid_is_the_same(model: Any, kept: Any) -> None:
    shared = {"layer": LAYERS, "mlp_input": FLAG, "pos_slice": POSITIONS, "return_labels": FLAG}
    calls = each(**shared, mode=["all", "mlp", "attn"], incl_embeds=[True, False])
    calls += each(**shared, apply_ln=[True, True])
    assert_same_calls(model, kept, "decompose_resid", calls)


def test_stack_activation_is_the_same(model: Any, kept: Any) -> None:
    calls = each(activation_name=["z", "pattern", "resid_pre", "mlp_out", "post", "nothing"], layer=[-1, 2, 1, 0, None])
    calls += each(activation_name=["scale", "normalized"], sublayer_type=["ln1", "ln2"])
    assert_same_calls(model, kept, "stack_activation", calls)


def test_head_results_are_the_same(model: Any, kept: Any) -> None:
    real, ours = pair_of(model, kept)
    assert real.compute_head_results() is ours.compute_head_results() is None
    assert sorted(ours) == sorted(real)
    for name in real:
        assert_same(ours[name], real[name])


def test_stack_head_results_is_the_same(model: Any, kept: Any) -> None:
    shared = {"layer": LAYERS, "pos_slice": POSITIONS, "return_labels": FLAG, "incl_remainder": FLAG, "apply_ln": FLAG}
    calls = [call for call in each(**shared) if not (call["layer"] == 0 and call["incl_remainder"])]
    assert_same_calls(model, kept, "stack_head_results", calls)


def test_get_neuron_results_is_the_same(model: Any, kept: Any) -> None:
    projections = [in_dtype(model, each) for each in (None, ONE, TWO)]
    calls = each(layer=[0, 2, -1], neuron_slice=POSITIONS, pos_slice=POSITIONS, project_output_onto=projections)
    calls += each(layer=[1, 0], neuron_slice=[3, -1], project_output_onto=[projections[1]] * 2)
    assert_same_calls(model, kept, "get_neuron_results", calls)


def test_stack_neuron_results_is_the_same(model: Any, kept: Any) -> None:
    neurons = [None, (2, 9), [0, 17]]
    shared = {"layer": LAYERS, "pos_slice": POSITIONS, "neuron_slice": neurons, "return_labels": FLAG}
    for projection in (None, ONE, TWO):
        shared["project_output_onto"] = [in_dtype(model, projection)] * 2
        calls = each(**shared, incl_remainder=FLAG, apply_ln=FLAG) + each(**shared, apply_ln=[True, True])
        calls += each(layer=[-1, 1], incl_remainder=[True, True], apply_ln=FLAG)
        calls = [call for call in calls if not (call["layer"] == 0 and call.get("incl_remainder"))]
        if model.cfg.normalization_type is None and projection is not None:
            calls = [call for call in calls if not call.get("apply_ln")]  # the real one looks for a scale all the same
        assert_same_calls(model, kept, "stack_neuron_results", calls)


def test_get_full_resid_decomposition_is_the_same(model: Any, kept: Any) -> None:
    # where the real one is wrong or fails, a test of its own below says what ours does
    expand = [False, False] if model.cfg.attn_only else [True, False]
    shared = {"layer": LAYERS, "expand_neurons": expand, "pos_slice": POSITIONS, "return_labels": FLAG}
    for projection in (None, ONE, TWO):
        onto = [in_dtype(model, projection)] * 2
        calls = each(**shared, mlp_input=FLAG, project_output_onto=onto)
        if projection is None:
            calls += each(**shared, mlp_input=[False, True], apply_ln=[True, True])
        elif model.cfg.normalization_type is not None:
            calls += each(**shared, apply_ln=[True, True], project_output_onto=onto)
        assert_same_calls(model, kept, "get_full_resid_decomposition", calls)


def test_apply_ln_to_stack_is_the_same(model: Any, kept: Any) -> None:
    lead = (BATCH,) if kept[1] else ()
    stack = torch.randn(4, *lead, POS, D_MODEL, generator=torch.Generator().manual_seed(3)).to(model.cfg.dtype)
    shared = {"layer": LAYERS, "mlp_input": FLAG, "has_batch_dim": [kept[1]] * 2, "recompute_ln": FLAG}
    calls = each(residual_stack=[stack] * 2, **shared, batch_slice=[None, 0, (1,)] if kept[1] else [None] * 2)
    calls += each(residual_stack=[stack[..., 1:3, :]] * 2, pos_slice=[(1, 3)] * 2, **shared)
    calls += each(residual_stack=[stack[..., 2, :]] * 2, pos_slice=[2] * 2, **shared)
    assert_same_calls(model, kept, "apply_ln_to_stack", calls)


def test_logit_attrs_is_the_same(model: Any, kept: Any) -> None:
    lead = (BATCH,) if kept[1] else ()
    stack = torch.randn(4, *lead, POS, D_MODEL, generator=torch.Generator().manual_seed(3)).to(model.cfg.dtype)
    grid, row = torch.randint(0, D_VOCAB, (*lead, POS)), torch.arange(POS)
    tokens = [7, torch.tensor(9), torch.tensor([4]), row, grid]
    calls = each(residual_stack=[stack] * 2, tokens=tokens, incorrect_tokens=[None, 3, torch.tensor(2), row, grid])
    calls += [{"residual_stack": stack, "tokens": pair, "incorrect_tokens": pair.flip(-1)} for pair in (row, grid)]
    calls += each(residual_stack=[stack[..., -1, :]] * 2, tokens=[3, torch.tensor(4)], pos_slice=[-1, -1])
    if kept[1]:
        calls += each(residual_stack=[stack] * 2, tokens=[7, row], batch_slice=[None, 1, [0, 1]])
    for call in calls:
        call["has_batch_dim"] = kept[1]
    assert_same_calls(model, kept, "logit_attrs", calls)


def test_every_form_of_a_name_finds_the_same_tensor(model: Any, kept: Any) -> None:
    real, ours = pair_of(model, kept)
    keys: list[Any] = [
        *real, "embed", "pos_embed", "z0", "z", "pattern", "scale", "normalized", "scale1ln2", "attn1", "mlp_out2",
        ("z", 0), ("z", 2, "attn"), ("attn", 1), ("k", -1), ("resid_post", -1), ("resid_pre", -3), ("resid_pre", -4),
        ("scale", 1, "ln1"), ("scale", None), ("scale",), ("post", 1, "m"), ("embed", None), ("z", 3), ("nothing", 1),
        ("resid_mid", 0, "b"), "blocks.9.hook_resid_pre", ["z", 1], ("z", "1"), 3, None, (),
    ]  # fmt: skip
    for key in keys:
        expected, found = outcome(lambda: real[key]), outcome(lambda: ours[key])
        assert found is expected or isinstance(found, type(expected)), key


def test_a_cache_is_the_same_dict(model: Any, kept: Any) -> None:
    real, ours = pair_of(model, kept)
    assert (len(ours), list(ours), list(ours.keys())) == (len(real), list(real), list(real.keys()))
    assert repr(ours) == repr(real)
    assert all(mine is theirs for mine, theirs in zip(ours.values(), real.values(), strict=True))
    assert [name for name, _ in ours.items()] == list(real)
    assert (ours.has_embed, ours.has_pos_embed) == (real.has_embed, real.has_pos_embed)
    assert ("hook_embed" in ours, "embed" in ours) == ("hook_embed" in real, "embed" in real)


def test_taking_batch_items_gives_the_same_cache(model: Any, kept: Any) -> None:
    for batch_slice in (0, 1, -1, (1,), (0, 2), [1, 0], None):
        caches = pair_of(model, kept)
        expected, found = (outcome(lambda: cache.apply_slice_to_batch_dim(batch_slice)) for cache in caches)
        if isinstance(expected, Exception):
            assert_same(found, expected)
            continue
        assert (list(found), found.has_batch_dim) == (list(expected), expected.has_batch_dim)
        for name in expected:
            assert_same(found[name], expected[name])


def test_removing_the_batch_axis_gives_the_same_cache(model: Any, kept: Any) -> None:
    single = ({name: value[:1] for name, value in kept[0].items()}, True) if kept[1] else kept
    for start in (kept, single):
        expected, found = (outcome(cache.remove_batch_dim) for cache in pair_of(model, start))
        if isinstance(expected, Exception):
            assert_same(found, expected)
            continue
        assert found.has_batch_dim is expected.has_batch_dim is False
        for name in expected:
            assert_same(found[name], expected[name])


def test_moving_a_cache_moves_every_tensor(model: Any, kept: Any) -> None:
    for cache in pair_of(model, kept):
        assert cache.to("meta") is cache
        assert {value.device.type for value in cache.values()} == {"meta"}


def test_autodiff_is_toggled_the_same_way(model: Any, kept: Any) -> None:
    before = torch.is_grad_enabled()
    try:
        for cache in pair_of(model, kept):
            states = []
            for arguments in ((), (True,), (False,)):
                cache.toggle_autodiff(*arguments)
                states.append(torch.is_grad_enabled())
            assert states == [False, True, False]
    finally:
        torch.set_grad_enabled(before)


def test_a_model_without_recurrent_mixers_says_so_the_same_way(model: Any, kept: Any) -> None:
    assert_same_calls(model, kept, "ssm_layers", [{}])
    for method in ("compute_ssm_state", "compute_ssm_effective_attention"):
        assert_same_calls(model, kept, method, [{}, {"layer": 1}])


def test_methods_take_the_same_arguments_with_the_same_defaults() -> None:
    names = [name for name in dir(RealCache) if not name.startswith("_") and callable(getattr(RealCache, name))]
    for name in [*names, "__init__", "__getitem__"]:
        real, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (RealCache, ActivationCache))
        shape_of = [[(p.name, p.kind, p.default) for p in parameters.values()] for parameters in (real, ours)]
        assert shape_of[1] == shape_of[0], name


def test_logit_attrs_of_token_strings_is_the_same() -> None:
    model = reference_model("gpt2")
    with torch.no_grad():
        cache = model.run_with_cache("Hello world")[1]
        kept = (cache.cache_dict, True)
        stack = cache.decompose_resid()
    words = [model.to_single_str_token(token) for token in (5, 6)]
    calls = each(residual_stack=[stack] * 2, tokens=[words[0], 5], incorrect_tokens=[None, words[1], 6])
    assert_same_calls(model, kept, "logit_attrs", calls)


def test_a_saved_cache_still_works_with_the_model_it_was_saved_with(tmp_path: Path) -> None:
    model = tiny_model("RMSPre")
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        torch.save(ActivationCache(real.cache_dict, model), tmp_path / "cache.pt")
        loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
        expected = real.logit_attrs(real.get_full_resid_decomposition(), 3)
        assert torch.equal(loaded.logit_attrs(loaded.get_full_resid_decomposition(), 3), expected)


# ---- where the real library is wrong or fails


def test_remainder_before_the_first_layer_is_the_embedding_not_the_final_stream() -> None:
    # the real one asks for resid_post of layer -1, which its own cache takes for the last layer's
    model = tiny_model("LN")
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        ours = ActivationCache(real.cache_dict, model)
        for method in ("stack_head_results", "stack_neuron_results"):
            assert torch.equal(getattr(real, method)(0, incl_remainder=True)[0], real["resid_post", -1])
            assert torch.equal(getattr(ours, method)(0, incl_remainder=True)[0], real["resid_pre", 0])


@pytest.mark.parametrize("name", ["LN", "RMS"])
def test_projected_neurons_at_an_mlp_input_take_the_norm_before_the_mlp(name: str) -> None:
    # the real one scales neurons by ln1 there and everything else by ln2; unprojected it uses ln2 throughout
    model = tiny_model(name)
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        arguments: dict[str, Any] = {"layer": 2, "mlp_input": True, "apply_ln": True}
        expected = real.get_full_resid_decomposition(**arguments) @ TWO
        arguments["project_output_onto"] = TWO
        theirs = real.get_full_resid_decomposition(**arguments)
        ours = ActivationCache(real.cache_dict, model).get_full_resid_decomposition(**arguments)
    assert (theirs - expected).abs().max() > 0.01 * expected.abs().max()
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_full_decomposition_of_an_attention_only_model_sums_to_the_stream() -> None:
    # the real one asks the missing MLPs for their biases
    model = tiny_model("attention only")
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        with pytest.raises(AttributeError):
            real.get_full_resid_decomposition()
        stack = ActivationCache(real.cache_dict, model).get_full_resid_decomposition()
    assert (stack.sum(0) - real["resid_post", -1]).abs().max() <= TOLERANCE * real["resid_post", -1].abs().max()


def test_projected_neurons_of_a_model_without_norms_are_not_scaled() -> None:
    # the real one looks for a cached scale there
    model = tiny_model("no norms")
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        with pytest.raises(KeyError):
            real.stack_neuron_results(2, apply_ln=True, project_output_onto=ONE)
        stack = ActivationCache(real.cache_dict, model).stack_neuron_results(2, apply_ln=True, project_output_onto=ONE)
        expected = real.stack_neuron_results(2, project_output_onto=ONE)
    assert torch.equal(stack, expected)


def test_one_neuron_a_layer_is_a_stack_of_its_own() -> None:
    # the real one fails to label it
    model = tiny_model("LN")
    with torch.no_grad():
        real = model.run_with_cache(torch.arange(POS)[None])[1]
        with pytest.raises(TypeError):
            real.stack_neuron_results(2, neuron_slice=7)
        ours = ActivationCache(real.cache_dict, model)
        stack, labels = ours.stack_neuron_results(2, neuron_slice=7, return_labels=True)
    assert labels == ["L0N7", "L1N7"]
    assert torch.equal(stack[1], real.get_neuron_results(1, neuron_slice=7))


def test_edited_head_results_stay_in_a_cache_without_a_batch_axis() -> None:
    # the real one takes [pos, head, d_model] for another library's entry and computes it anew, edit lost
    model = tiny_model("head results")

    def doubled(result: torch.Tensor, hook: Any) -> torch.Tensor:
        return 2 * result

    with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.0.attn.hook_result", doubled)]):
        _, cache_dict = model.run_with_cache(torch.arange(POS)[None], remove_batch_dim=True, return_cache_object=False)
    cached = cache_dict["blocks.0.attn.hook_result"].clone()
    stack = ActivationCache(cache_dict, model, has_batch_dim=False).stack_head_results(1)
    assert torch.equal(stack, cached.movedim(-2, 0))
