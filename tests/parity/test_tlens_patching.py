"""Patching against TransformerLens' own functions, run on the same real model: the numbers must be identical."""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
import transformer_lens
from transformer_lens import patching as theirs

from compat.tlens import patching as ours

SIZES = {"n_layers": 2, "d_model": 24, "n_ctx": 8, "d_head": 6, "n_heads": 4, "d_mlp": 40, "d_vocab": 31}
PATCHES = [name for name in dir(theirs) if name.startswith("get_act_patch")]
IMPORTS = """
    ActivationCache Callable Float HookedTransformer Int Literal Optional Sequence Tuple Union annotations einops
    itertools overload partial pd torch tqdm utils
""".split()


@pytest.fixture(scope="module", params=[None, 2], ids=["one key head a head", "grouped key heads"])
def scene(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A random model, corrupted tokens, the clean cache and a metric, as the arguments of a patching function."""
    cfg = transformer_lens.HookedTransformerConfig(
        **SIZES, n_key_value_heads=request.param, act_fn="gelu", normalization_type="LN", seed=3, device="cpu"
    )
    model = transformer_lens.HookedTransformer(cfg)
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    clean, corrupted = torch.randint(0, cfg.d_vocab, (2, 2, 5))
    _, cache = model.run_with_cache(clean)
    return {"model": model, "corrupted_tokens": corrupted, "clean_cache": cache}


def metric(logits: torch.Tensor) -> torch.Tensor:
    """A logit difference that depends on everything before the last position."""
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean()


def run(module: ModuleType, name: str, scene: dict[str, Any], **more: Any) -> Any:
    with torch.no_grad():
        return getattr(module, name)(*scene.values(), metric, **more)


def test_every_public_name_is_here() -> None:
    assert {name for name in dir(theirs) if not name.startswith("_")} - set(IMPORTS) <= set(dir(ours))


@pytest.mark.parametrize("name", [name for name in dir(theirs) if inspect.isfunction(getattr(theirs, name))])
def test_parameters_are_those_of_the_original(name: str) -> None:
    if name not in IMPORTS:
        wanted, found = (inspect.signature(getattr(module, name)).parameters.values() for module in (theirs, ours))
        assert [(p.name, p.default, p.kind) for p in found] == [(p.name, p.default, p.kind) for p in wanted]


@pytest.mark.parametrize("name", [name for name in PATCHES if isinstance(getattr(theirs, name), partial)])
def test_partials_hold_the_same_activation_setter_and_axes(name: str) -> None:
    wanted, found = (dict(getattr(module, name).keywords) for module in (theirs, ours))
    assert found.pop("patch_setter").__name__ == wanted.pop("patch_setter").__name__
    assert found == wanted


@pytest.mark.parametrize("name", PATCHES)
def test_results_are_identical(name: str, scene: dict[str, Any]) -> None:
    found, wanted = run(ours, name, scene), run(theirs, name, scene)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert torch.equal(found, wanted)
    assert wanted.unique().numel() > 2  # the patches did something


def test_results_are_identical_with_gradients_on(scene: dict[str, Any]) -> None:
    found, wanted = (module.get_act_patch_resid_mid(*scene.values(), metric) for module in (ours, theirs))
    assert torch.equal(found, wanted)


def test_index_tables_are_identical(scene: dict[str, Any]) -> None:
    name = "get_act_patch_attn_head_k_by_pos"
    found, table = run(ours, name, scene, return_index_df=True)
    wanted, their_table = run(theirs, name, scene, return_index_df=True)
    pd.testing.assert_frame_equal(table, their_table)
    assert torch.equal(found, wanted)

    some = {"index_axis_names": None, "index_df": table.iloc[[5, 0, 3]]}
    found, wanted = (run(module, name, scene, **some) for module in (ours, theirs))
    assert found.shape == (3,) and torch.equal(found, wanted)
