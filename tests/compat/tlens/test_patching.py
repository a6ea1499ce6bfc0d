"""Activation patching on a model of a few lines, with no other library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compat.tlens import patching
from engine.errors import CompatError, UnknownName

N_LAYERS, N_POS, N_HEADS, N_KEY_HEADS = 2, 3, 4, 2
HEADS_LAST = {name: (1, N_POS, n_heads, 5) for name, n_heads in {"z": 4, "q": 4, "k": 2, "v": 2}.items()}
SHAPES = HEADS_LAST | {name: (1, N_POS, 5) for name in ("resid_pre", "resid_mid", "attn_out", "mlp_out")}
SHAPES["pattern"] = (1, N_HEADS, N_POS, N_POS)
PATCHES = {name: patch for name, patch in vars(patching).items() if hasattr(patch, "keywords") and "act_patch" in name}


class Recorder:
    """Gives every hooked activation as zeros, and as logits the sum of what the hooks made of them."""

    cfg = SimpleNamespace(n_layers=N_LAYERS, n_heads=N_HEADS, n_key_value_heads=N_KEY_HEADS, device="cpu")
    grad = False

    def run_with_hooks(self, tokens: torch.Tensor, fwd_hooks: list[tuple[str, Any]]) -> torch.Tensor:
        [(name, hook)] = fwd_hooks
        return hook(torch.zeros(SHAPES[short(name)], requires_grad=self.grad), hook=None).sum()


class Counting(dict):
    """A clean cache whose entries are all different, so that a sum tells which were taken."""

    def __missing__(self, name: str) -> torch.Tensor:
        torch.manual_seed(len(name) + int(name.split(".")[1]))
        return self.setdefault(name, torch.rand(SHAPES[short(name)]))


def short(name: str) -> str:
    return name.rpartition("hook_")[2]


TOKENS = torch.zeros(1, N_POS, dtype=torch.long)


def run(patch: Any, model: Any = None, **more: Any) -> Any:
    return patch(model or Recorder(), TOKENS, Counting(), lambda logits: logits, **more)


def test_all_named_patches_are_covered_here() -> None:
    assert len(PATCHES) == 15
    assert all("Patch " in patch.__doc__ for patch in PATCHES.values())


@pytest.mark.parametrize("name", PATCHES)
def test_each_entry_holds_the_metric_of_exactly_its_own_patch(name: str) -> None:
    activation = PATCHES[name].keywords["activation_name"]
    axes = PATCHES[name].keywords["index_axis_names"]
    found = run(PATCHES[name])
    order = {"layer": 0, "head": 1, "head_index": 1} | {"pos": 2, "dest_pos": 2, "src_pos": 3}
    clean = [Counting()[patching.get_act_name(activation, layer)][0] for layer in range(N_LAYERS)]
    whole = torch.stack(clean)  # [layer, pos, ...] or, for a pattern, [layer, head, dest, src]
    names = ["layer", "head_index", "dest_pos", "src_pos"] if activation == "pattern" else ["layer", "pos", "head"]
    summed = [axis for axis in range(whole.ndim) if axis >= len(names) or names[axis] not in axes]
    expected = whole.sum(dim=summed) if summed else whole
    assert sorted(axes, key=order.get)[0] == "layer"
    assert torch.allclose(found, expected)


@pytest.mark.parametrize(
    ("every", "shape"),
    [
        (patching.get_act_patch_attn_head_all_pos_every, (5, N_LAYERS, N_HEADS)),
        (patching.get_act_patch_attn_head_by_pos_every, (5, N_LAYERS, N_POS, N_HEADS)),
        (patching.get_act_patch_block_every, (3, N_LAYERS, N_POS)),
    ],
)
def test_every_patch_stacks_the_single_ones(every: Any, shape: tuple[int, ...]) -> None:
    results = run(every)
    assert results.shape == shape
    if shape[0] == 5:
        assert results[2, ..., :N_KEY_HEADS].all() and not results[2, ..., N_KEY_HEADS:].any()


def test_a_list_of_indices_gives_one_result_a_row() -> None:
    pd = pytest.importorskip("pandas")
    rows = pd.DataFrame([[1, 2], [0, 1], [1, 0]], columns=["layer", "pos"])
    found, returned = run(patching.get_act_patch_mlp_out, index_axis_names=None, index_df=rows, return_index_df=True)
    whole = run(patching.get_act_patch_mlp_out)
    assert found.tolist() == [whole[1, 2].item(), whole[0, 1].item(), whole[1, 0].item()]
    assert returned is rows


def test_an_activation_with_a_gradient_is_patched_in_a_copy() -> None:
    model = Recorder()
    model.grad = True
    assert torch.equal(run(patching.get_act_patch_resid_pre, model), run(patching.get_act_patch_resid_pre))


def test_only_an_index_table_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(patching.get_act_patch_resid_pre).shape == (N_LAYERS, N_POS)
    with pytest.raises(ImportError, match="pip install pandas") as caught:
        run(patching.get_act_patch_resid_pre, return_index_df=True)
    assert isinstance(caught.value, CompatError)


@pytest.mark.parametrize("more", [{"index_axis_names": None}, {"index_df": "any"}])
def test_both_or_neither_kind_of_index_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="either index_axis_names or index_df"):
        run(patching.get_act_patch_resid_pre, **more)


def test_an_unknown_axis_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'dest_pos'"):
        run(patching.get_act_patch_resid_pre, index_axis_names=("layer", "dst_pos"))


def test_a_setter_refuses_an_index_of_another_length() -> None:
    with pytest.raises(AssertionError, match="takes 2 indices"):
        patching.layer_pos_patch_setter(torch.zeros(1, 3, 5), [0, 1, 2], torch.zeros(1, 3, 5))
