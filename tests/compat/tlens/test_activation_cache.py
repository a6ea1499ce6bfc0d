"""`ActivationCache` over a hand-made model: names, files and copies, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compat.tlens.ActivationCache import ActivationCache
from engine.errors import BadInput, Refused, UnknownName

N_LAYERS, BATCH, POS, D_MODEL, N_HEADS, D_HEAD, D_MLP = 2, 3, 4, 6, 2, 5, 7


class Model:
    """The attributes that a cache asks a model for, with random weights."""

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(
            n_layers=N_LAYERS, n_heads=N_HEADS, d_mlp=D_MLP, d_model=D_MODEL, attn_only=False, normalization_type="RMS"
        )
        self.W_U = torch.randn(D_MODEL, 11)
        self.blocks = [
            SimpleNamespace(
                attn=SimpleNamespace(W_O=torch.randn(N_HEADS, D_HEAD, D_MODEL), b_O=torch.randn(D_MODEL)),
                mlp=SimpleNamespace(W_out=torch.randn(D_MLP, D_MODEL), b_out=torch.randn(D_MODEL)),
            )
            for _ in range(N_LAYERS)
        ]

    def tokens_to_residual_directions(self, tokens: Any) -> torch.Tensor:
        return self.W_U[:, tokens].movedim(0, -1)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> torch.Tensor:
        attn = sum((block.attn.b_O for block in self.blocks[: layer + mlp_input]), torch.zeros(D_MODEL))
        return attn + sum((block.mlp.b_out for block in self.blocks[:layer]), torch.zeros(D_MODEL)) * include_mlp_biases

    def ln_final(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class Unpicklable(Model):
    def __getstate__(self) -> dict:
        raise TypeError("a running engine cannot be pickled")


def activations_of(model: Model, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """A run whose stream is the sum of what its parts write, norms apart."""
    cache = {"hook_embed": torch.randn(batch, POS, D_MODEL), "hook_pos_embed": torch.randn(batch, POS, D_MODEL)}
    stream = cache["hook_embed"] + cache["hook_pos_embed"]
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}."
        z, post = torch.randn(batch, POS, N_HEADS, D_HEAD), torch.randn(batch, POS, D_MLP)
        cache |= {at + "hook_resid_pre": stream, at + "attn.hook_z": z, at + "mlp.hook_post": post}
        cache[at + "hook_attn_out"] = torch.einsum("bphd,hdm->bpm", z, block.attn.W_O) + block.attn.b_O
        cache[at + "hook_resid_mid"] = stream + cache[at + "hook_attn_out"]
        cache[at + "hook_mlp_out"] = post @ block.mlp.W_out + block.mlp.b_out
        cache[at + "ln1.hook_scale"] = stream.pow(2).mean(-1, keepdim=True).sqrt()
        cache[at + "ln2.hook_scale"] = cache[at + "hook_resid_mid"].pow(2).mean(-1, keepdim=True).sqrt()
        stream = cache[at + "hook_resid_mid"] + cache[at + "hook_mlp_out"]
        cache[at + "hook_resid_post"] = stream
    cache["ln_final.hook_scale"] = stream.pow(2).mean(-1, keepdim=True).sqrt()
    return cache


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def cache(model: Model) -> ActivationCache:
    return ActivationCache(activations_of(model), model)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("expand_neurons", [True, False])
@pytest.mark.parametrize(("layer", "mlp_input"), [(None, False), (1, False), (1, True), (0, False), (0, True)])
def test_every_decomposition_sums_to_the_stream(
    cache: ActivationCache, layer: int | None, mlp_input: bool, expand_neurons: bool
) -> None:
    stream = cache["resid_post", -1] if layer is None else cache["resid_mid" if mlp_input else "resid_pre", layer]
    arguments: dict[str, Any] = {"layer": layer, "mlp_input": mlp_input}
    full, labels = cache.get_full_resid_decomposition(**arguments, expand_neurons=expand_neurons, return_labels=True)
    assert close(full.sum(0), stream) and len(labels) == len(full)
    assert close(cache.decompose_resid(**arguments).sum(0), stream)
    normed = cache.get_full_resid_decomposition(**arguments, expand_neurons=expand_neurons, apply_ln=True)
    assert close(normed.sum(0), cache.apply_ln_to_stack(stream[None], layer, mlp_input)[0])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_stack_with_its_remainder_sums_to_the_stream(cache: ActivationCache, layer: int) -> None:
    stream = cache["resid_post", -1] if layer == N_LAYERS else cache["resid_pre", layer]
    assert close(cache.stack_head_results(layer, incl_remainder=True).sum(0), stream)
    assert close(cache.stack_neuron_results(layer, incl_remainder=True, neuron_slice=(1, 4)).sum(0), stream)


def test_projection_is_that_of_the_unprojected_stack(cache: ActivationCache) -> None:
    onto = torch.randn(D_MODEL, 3)
    for arguments in ({"apply_ln": True}, {"apply_ln": False}, {"apply_ln": True, "layer": 1, "mlp_input": True}):
        full = cache.get_full_resid_decomposition(**arguments)
        assert close(cache.get_full_resid_decomposition(**arguments, project_output_onto=onto), full @ onto)
        assert close(cache.get_full_resid_decomposition(**arguments, project_output_onto=onto[:, 0]), full @ onto[:, 0])


def test_logit_lens_normalizes_each_stream_by_its_own_scale(cache: ActivationCache, model: Model) -> None:
    streams = cache.accumulated_resid(incl_mid=True)
    assert torch.equal(cache.accumulated_resid(incl_mid=True, apply_ln=True), model.ln_final(streams))


def test_missing_name_raises_with_the_nearest_cached_names(cache: ActivationCache) -> None:
    with pytest.raises(UnknownName, match=r"'blocks.7.attn.hook_z'; the nearest .*'blocks.1.attn.hook_z'") as caught:
        cache["z", 7]
    assert isinstance(caught.value, KeyError) and "('z', 7)" in str(caught.value)
    with pytest.raises(KeyError):
        cache["blocks.0.attn.hook_zz"]
    with pytest.raises(UnknownName, match="ln1.hook_scale"):
        ActivationCache({}, cache.model).apply_ln_to_stack(cache.decompose_resid(1), 1)


def test_layer_counted_from_the_end_is_refused_where_it_would_mean_an_empty_stack(cache: ActivationCache) -> None:
    for method in ("accumulated_resid", "decompose_resid", "stack_head_results", "stack_neuron_results"):
        with pytest.raises(BadInput, match="layer"):
            getattr(cache, method)(layer=-2)


def test_incorrect_tokens_of_another_shape_are_refused(cache: ActivationCache) -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(\)"):
        cache.logit_attrs(cache.decompose_resid(), torch.arange(3), 4)


def test_batch_axis_of_a_larger_batch_is_not_removed(cache: ActivationCache) -> None:
    with pytest.raises(AssertionError, match="batch size 3"):
        cache.remove_batch_dim()
    assert cache.has_batch_dim and cache["embed"].shape == (BATCH, POS, D_MODEL)


def test_entry_broadcast_over_the_batch_is_left_whole(cache: ActivationCache) -> None:
    cache.cache_dict["hook_bias"] = torch.zeros(1, POS)
    assert cache.apply_slice_to_batch_dim(2)["hook_bias"].shape == (1, POS)
    assert torch.equal(cache.apply_slice_to_batch_dim(2)["embed"], cache["embed"][2])


@pytest.mark.parametrize("via", ["torch", "pickle"])
def test_saved_cache_comes_back_with_its_model(cache: ActivationCache, tmp_path: Path, via: str) -> None:
    loaded = round_trip(cache, tmp_path, via)
    assert list(loaded) == list(cache) and loaded.has_pos_embed
    assert torch.equal(loaded.stack_head_results(), cache.stack_head_results())
    assert torch.equal(loaded.logit_attrs(loaded.decompose_resid(), 3), cache.logit_attrs(cache.decompose_resid(), 3))


@pytest.mark.parametrize("via", ["torch", "pickle"])
def test_cache_of_a_model_that_cannot_be_pickled_is_saved_without_it(tmp_path: Path, via: str) -> None:
    model = Unpicklable()
    cache = ActivationCache(activations_of(model), model)
    loaded = round_trip(cache, tmp_path, via)
    assert cache.model is model
    assert torch.equal(loaded["z", -1], cache["z", -1])
    assert torch.equal(loaded.decompose_resid(apply_ln=True), cache.decompose_resid(apply_ln=True))
    for needs_weights in (loaded.stack_head_results, lambda: loaded.accumulated_resid(apply_ln=True)):
        with pytest.raises(Refused, match="cache.model = model"):
            needs_weights()
    loaded.model = model
    assert torch.equal(loaded.stack_head_results(), cache.stack_head_results())


def test_saving_copies_no_weights_while_it_looks_at_the_model(cache: ActivationCache, monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", lambda *_: pytest.fail("a tensor was pickled"))
    assert cache.__getstate__()["model"] is cache.model


def test_cache_without_a_model_is_saved_too(cache: ActivationCache, tmp_path: Path) -> None:
    cache.model = None
    assert round_trip(cache, tmp_path, "torch").model is None


def test_deepcopy_has_its_own_tensors_and_the_same_model(cache: ActivationCache) -> None:
    twin = copy.deepcopy(cache)
    twin["embed"].zero_()
    assert twin.model is cache.model and cache["embed"].abs().max() > 0
    assert copy.copy(cache).cache_dict is cache.cache_dict


def round_trip(cache: ActivationCache, folder: Path, via: str) -> ActivationCache:
    if via == "pickle":
        return pickle.loads(pickle.dumps(cache))
    torch.save(cache, folder / "cache.pt")
    return torch.load(folder / "cache.pt", weights_only=False)
