"""Patching helpers on our own model against TransformerLens' on theirs: the same effects everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from tests.parity.pairs import Pair, assert_close, error, random_tokens

# Each run of a helper is one forward a layer, position and head, so prompts are short.
HELPERS = [
    "resid_pre", "resid_mid", "attn_out", "mlp_out",
    "attn_head_out_by_pos", "attn_head_q_by_pos", "attn_head_k_by_pos", "attn_head_v_by_pos",
    "attn_head_pattern_by_pos", "attn_head_pattern_dest_src_pos",
    "attn_head_out_all_pos", "attn_head_q_all_pos", "attn_head_k_all_pos", "attn_head_v_all_pos",
    "attn_head_pattern_all_pos",
]  # fmt: skip
QUICK = ["resid_pre", "mlp_out", "attn_head_out_by_pos", "attn_head_v_all_pos", "attn_head_pattern_all_pos"]
EVERY = ["attn_head_all_pos_every", "block_every"]


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 7] - logits[:, -1, 11]).mean()


def patching_of(model: Any) -> Any:
    if type(model).__module__.startswith("transformer_lens"):
        from transformer_lens import patching
    else:
        from compat.tlens import patching
    return patching


@torch.no_grad()
def patch(model: Any, helper: str, clean: Tensor, corrupted: Tensor, **arguments: Any) -> Any:
    _, cache = model.run_with_cache(clean)
    return getattr(patching_of(model), f"get_act_patch_{helper}")(model, corrupted, cache, metric, **arguments)


def prompts(pair: Pair) -> tuple[Tensor, Tensor]:
    return random_tokens(pair, rows=1, pos=3, seed=1), random_tokens(pair, rows=1, pos=3, seed=2)


def assert_same_patches(pair: Pair, helper: str) -> None:
    if helper == "resid_mid" and pair.theirs.cfg.parallel_attn_mlp:
        for model in (pair.ours, pair.theirs):
            with pytest.raises(KeyError):
                patch(model, helper, *prompts(pair))
        return
    try:
        expected = patch(pair.theirs, helper, *prompts(pair))
    except Exception as failure:  # their helper counts query heads where keys and values have fewer
        with pytest.raises(type(failure)):
            patch(pair.ours, helper, *prompts(pair))
        return
    found = patch(pair.ours, helper, *prompts(pair))
    assert_close(found, expected, helper)
    assert error(found.flatten()[1:], found.flatten()[:-1]) > 0.01  # the patches did something


@pytest.mark.parametrize("helper", QUICK)
def test_patches_have_the_same_effect(processed_pair: Pair, helper: str) -> None:
    assert_same_patches(processed_pair, helper)


@pytest.mark.slow
@pytest.mark.parametrize("helper", HELPERS + EVERY)
def test_patches_of_every_helper_have_the_same_effect(processed_pair: Pair, helper: str) -> None:
    assert_same_patches(processed_pair, helper)


def test_index_tables_are_theirs(processed_pair: Pair) -> None:
    run = partial(
        patch, helper="attn_head_out_all_pos", clean=prompts(processed_pair)[0], corrupted=prompts(processed_pair)[1]
    )
    (found, table), (expected, their_table) = processed_pair.both(lambda model: run(model, return_index_df=True))
    assert_close(found, expected)
    pd.testing.assert_frame_equal(table, their_table)


def test_patching_clean_into_clean_changes_nothing(pair: Pair) -> None:
    clean, _ = prompts(pair)
    with torch.no_grad():
        value = metric(pair.ours(clean))
    patched = patch(pair.ours, "attn_head_out_all_pos", clean, clean)
    assert_close(patched, value.expand(patched.shape))


def test_a_path_is_patched_alike(pair: Pair) -> None:
    """By hand, as notebooks do: a sender's change reaches one receiver, and all else is frozen."""
    clean, corrupted = prompts(pair)

    def run(model: Any) -> Tensor:
        _, clean_cache = model.run_with_cache(clean)
        _, cache = model.run_with_cache(corrupted)
        sender, receiver = "blocks.0.attn.hook_z", "blocks.2.attn.hook_q"

        def freeze(z: Tensor, hook: Any) -> Tensor:
            if hook.name == sender:
                z = cache[hook.name].clone()
                z[:, :, 1] = clean_cache[hook.name][:, :, 1]
                return z
            return cache[hook.name]

        frozen = [(lambda name: name.endswith(("attn.hook_z", "hook_mlp_out")), freeze)]
        model.add_hook(*frozen[0])
        _, patched = model.run_with_cache(corrupted, names_filter=receiver)
        model.reset_hooks()
        return model.run_with_hooks(corrupted, fwd_hooks=[(receiver, lambda q, hook: patched[hook.name])])

    found, expected = pair.both(run)
    assert_close(found, expected)
    assert error(found, pair.ours(corrupted)) > 1e-4
