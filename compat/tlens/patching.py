"""Activation patching: run on corrupted tokens with one activation at a time taken from a clean run, and measure.

`generic_activation_patch` does the work; every `get_act_patch_*` is it with an activation, a setter and axes filled in.
A model here is anything with `cfg`, `run_with_hooks` and TransformerLens' hook names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm

from compat.tlens.errors import require
from compat.tlens.utilities.components_utils import get_act_name
from compat.tlens.utilities.library_utils import import_optional
from engine.errors import UnknownName

if TYPE_CHECKING:
    import pandas as pd

Logits = torch.Tensor
CorruptedActivation = torch.Tensor
PatchedActivation = torch.Tensor
AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
PatchSetter = Callable[[torch.Tensor, Sequence[int], torch.Tensor], torch.Tensor]
Metric = Callable[[torch.Tensor], torch.Tensor]


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> pd.DataFrame:
    """A DataFrame of every index tuple below `column_max_ranges`, the last column changing fastest. Needs pandas."""
    pd = import_optional("pandas", "an index_df of patching")
    return pd.DataFrame(_every_index(column_max_ranges), columns=column_names)


def generic_activation_patch(
    model: Any,
    corrupted_tokens: torch.Tensor,
    clean_cache: Mapping[str, torch.Tensor],
    patching_metric: Metric,
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[AxisNames] | None = None,
    index_df: pd.DataFrame | None = None,
    return_index_df: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, pd.DataFrame]:
    """The metric of a corrupted run, once for each index, with that part of one activation taken from the clean cache.

    Either `index_axis_names` says which axes to go through in full, layer first, and the result has one axis for each;
    or `index_df` lists the indices, a row for each, and the result is `[row]`. AssertionError unless exactly one is
    given. `patch_setter(corrupted, index, clean)` may edit in place and returns the activation; `patching_metric` takes
    logits `[batch, pos, d_vocab]` to a scalar tensor. `return_index_df` adds the DataFrame of indices (needs pandas).
    """
    require((index_df is None) != (index_axis_names is None), "give either index_axis_names or index_df")
    if index_df is None:
        sizes = _axis_sizes(model.cfg, corrupted_tokens.shape[-1], activation_name, index_axis_names)
        indices = _every_index(sizes)
    else:
        indices = [row.to_list() for _, row in index_df.iterrows()]
        sizes = [len(indices)]
    results = torch.zeros(sizes, device=model.cfg.device)
    flat = results.view(-1)
    for row, index in enumerate(tqdm(indices)):
        name = get_act_name(activation_name, layer=index[0])
        hook = partial(_patch, setter=patch_setter, index=index, clean=clean_cache[name])
        flat[row] = patching_metric(model.run_with_hooks(corrupted_tokens, fwd_hooks=[(name, hook)])).item()
    if not return_index_df:
        return results
    return results, make_df_from_ranges(sizes, index_axis_names) if index_df is None else index_df


def _axis_sizes(cfg: Any, n_pos: int, activation_name: str, axes: Sequence[str]) -> list[int]:
    grouped = activation_name in ("k", "v") and cfg.n_key_value_heads is not None
    n_heads = cfg.n_key_value_heads if grouped else cfg.n_heads
    sizes = {"layer": cfg.n_layers}
    sizes |= dict.fromkeys(("pos", "src_pos", "dest_pos"), n_pos) | dict.fromkeys(("head", "head_index"), n_heads)
    for axis in axes:
        if axis not in sizes:
            raise UnknownName(axis, sizes, "patching axis")
    return [sizes[axis] for axis in axes]


def _every_index(sizes: Sequence[int]) -> list[list[int]]:
    return [list(index) for index in itertools.product(*map(range, sizes))]


def _patch(
    activation: torch.Tensor, hook: Any, setter: PatchSetter, index: list[int], clean: torch.Tensor
) -> torch.Tensor:
    # A setter writes in place, which autograd forbids on what other operations still need.
    return setter(activation.clone() if activation.requires_grad else activation, index, clean)


def layer_pos_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, pos] of an activation `[batch, pos, ...]`."""
    _layer, pos = _split(index, 2)
    corrupted_activation[:, pos] = clean_activation[:, pos]
    return corrupted_activation


def layer_pos_head_vector_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, pos, head] of an activation `[batch, pos, head, ...]`."""
    _layer, pos, head = _split(index, 3)
    corrupted_activation[:, pos, head] = clean_activation[:, pos, head]
    return corrupted_activation


def layer_head_vector_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, head] of an activation `[batch, pos, head, ...]`, at every position."""
    _layer, head = _split(index, 2)
    corrupted_activation[:, :, head] = clean_activation[:, :, head]
    return corrupted_activation


def layer_head_pattern_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, head] of a pattern `[batch, head, dest_pos, src_pos]`."""
    _layer, head = _split(index, 2)
    corrupted_activation[:, head] = clean_activation[:, head]
    return corrupted_activation


def layer_head_pos_pattern_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, head, dest_pos] of a pattern `[batch, head, dest_pos, src_pos]`."""
    _layer, head, dest_pos = _split(index, 3)
    corrupted_activation[:, head, dest_pos] = clean_activation[:, head, dest_pos]
    return corrupted_activation


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: torch.Tensor, index: Sequence[int], clean_activation: torch.Tensor
) -> torch.Tensor:
    """Patch index [layer, head, dest_pos, src_pos] of a pattern `[batch, head, dest_pos, src_pos]`."""
    _layer, head, dest_pos, src_pos = _split(index, 4)
    corrupted_activation[:, head, dest_pos, src_pos] = clean_activation[:, head, dest_pos, src_pos]
    return corrupted_activation


def _split(index: Sequence[int], n_axes: int) -> Sequence[int]:
    require(len(index) == n_axes, f"this patch setter takes {n_axes} indices, got {list(index)}")
    return index


def _act_patch(activation_name: str, what: str, setter: PatchSetter, axes: str) -> partial:
    names = tuple(axes.split())
    patch = partial(
        generic_activation_patch, patch_setter=setter, activation_name=activation_name, index_axis_names=names
    )
    patch.__doc__ = (
        f"Patch {what} (`{activation_name}`) at each [{', '.join(names)}] in turn; the result has that shape.\n\n"
        "Arguments: model, corrupted_tokens `[batch, pos]`, clean_cache, patching_metric; see generic_activation_patch."
    )
    return patch


_pos = layer_pos_patch_setter
_head_pos = layer_pos_head_vector_patch_setter
_head = layer_head_vector_patch_setter
_pattern = layer_head_pattern_patch_setter
_row = layer_head_pos_pattern_patch_setter
_entry = layer_head_dest_src_pos_pattern_patch_setter

get_act_patch_resid_pre = _act_patch("resid_pre", "the residual stream entering a block", _pos, "layer pos")
get_act_patch_resid_mid = _act_patch("resid_mid", "the residual stream before the MLP", _pos, "layer pos")
get_act_patch_attn_out = _act_patch("attn_out", "the output of attention", _pos, "layer pos")
get_act_patch_mlp_out = _act_patch("mlp_out", "the output of the MLP", _pos, "layer pos")

get_act_patch_attn_head_out_by_pos = _act_patch("z", "a head's output", _head_pos, "layer pos head")
get_act_patch_attn_head_q_by_pos = _act_patch("q", "a head's query", _head_pos, "layer pos head")
get_act_patch_attn_head_k_by_pos = _act_patch("k", "a key-value head's key", _head_pos, "layer pos head")
get_act_patch_attn_head_v_by_pos = _act_patch("v", "a key-value head's value", _head_pos, "layer pos head")
get_act_patch_attn_head_pattern_by_pos = _act_patch(
    "pattern", "a row of a head's pattern", _row, "layer head_index dest_pos"
)
get_act_patch_attn_head_pattern_dest_src_pos = _act_patch(
    "pattern", "an entry of a head's pattern", _entry, "layer head_index dest_pos src_pos"
)

get_act_patch_attn_head_out_all_pos = _act_patch("z", "a head's output, everywhere", _head, "layer head")
get_act_patch_attn_head_q_all_pos = _act_patch("q", "a head's query, everywhere", _head, "layer head")
get_act_patch_attn_head_k_all_pos = _act_patch("k", "a key-value head's key, everywhere", _head, "layer head")
get_act_patch_attn_head_v_all_pos = _act_patch("v", "a key-value head's value, everywhere", _head, "layer head")
get_act_patch_attn_head_pattern_all_pos = _act_patch("pattern", "a head's pattern", _pattern, "layer head_index")


def get_act_patch_attn_head_all_pos_every(
    model: Any, corrupted_tokens: torch.Tensor, clean_cache: Mapping[str, torch.Tensor], metric: Metric
) -> torch.Tensor:
    """Every head's output, queries, keys, values and pattern in turn: `[5, layer, head]`.

    Where keys and values have fewer heads, the missing ones are 0.
    """
    patches = (
        get_act_patch_attn_head_out_all_pos,
        get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos,
        get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )
    return _stack_heads([patch(model, corrupted_tokens, clean_cache, metric) for patch in patches])


def get_act_patch_attn_head_by_pos_every(
    model: Any, corrupted_tokens: torch.Tensor, clean_cache: Mapping[str, torch.Tensor], metric: Metric
) -> torch.Tensor:
    """Every head's output, query, key, value and pattern row at each position in turn: `[5, layer, pos, head]`.

    Where keys and values have fewer heads, the missing ones are 0.
    """
    patches = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
    )
    by_head = [patch(model, corrupted_tokens, clean_cache, metric) for patch in patches]
    pattern = get_act_patch_attn_head_pattern_by_pos(model, corrupted_tokens, clean_cache, metric)
    return _stack_heads([*by_head, pattern.transpose(-1, -2)])


def _stack_heads(results: list[torch.Tensor]) -> torch.Tensor:
    n_heads = results[0].shape[-1]
    return torch.stack([F.pad(result, (0, n_heads - result.shape[-1])) for result in results])


def get_act_patch_block_every(
    model: Any, corrupted_tokens: torch.Tensor, clean_cache: Mapping[str, torch.Tensor], metric: Metric
) -> torch.Tensor:
    """The residual stream entering a block, its attention output and its MLP output in turn: `[3, layer, pos]`."""
    patches = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return torch.stack([patch(model, corrupted_tokens, clean_cache, metric) for patch in patches])
