"""`ActivationCache` on a run of our own model against TransformerLens' on a run of theirs: what is read off a cache.

The methods themselves are held to theirs over one and the same run in test_tlens_activation_cache.py; here the weights,
norms and activations that they ask for are ours too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.pairs import Pair, assert_close, assert_same_cache, random_tokens

Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    "a short name": lambda cache: [
        cache["resid_pre", 1],
        cache["k", -1],
        cache["pattern", 0],
        cache["scale", 1, "ln1"],
    ],
    "the stream": lambda cache: cache.accumulated_resid(),
    "the stream with the middles": lambda cache: cache.accumulated_resid(incl_mid=True, return_labels=True),
    "the stream, normalized": lambda cache: cache.accumulated_resid(apply_ln=True, pos_slice=-1),
    "the stream up to an MLP": lambda cache: cache.accumulated_resid(1, mlp_input=True, apply_ln=True),
    "components": lambda cache: cache.decompose_resid(return_labels=True),
    "components, normalized": lambda cache: cache.decompose_resid(apply_ln=True, pos_slice=(1, 4)),
    "components of a layer": lambda cache: cache.decompose_resid(2, mode="attn", incl_embeds=False, apply_ln=True),
    "components up to an MLP": lambda cache: cache.decompose_resid(1, mlp_input=True, mode="mlp"),
    "heads": lambda cache: cache.stack_head_results(return_labels=True),
    "heads and the rest": lambda cache: cache.stack_head_results(2, incl_remainder=True, apply_ln=True, pos_slice=-1),
    "heads after compute": lambda cache: (cache.compute_head_results(), cache["result", 1])[1],
    "neurons": lambda cache: cache.stack_neuron_results(2, pos_slice=-1, return_labels=True),
    "neurons and the rest": lambda cache: cache.stack_neuron_results(
        1, pos_slice=-1, incl_remainder=True, apply_ln=True
    ),
    "some neurons": lambda cache: cache.get_neuron_results(1, neuron_slice=(3, 9), pos_slice=2),
    "everything": lambda cache: cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True),
    "everything, normalized": lambda cache: cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1),
    "a stack of activations": lambda cache: cache.stack_activation("z"),
    "a stack of scales": lambda cache: cache.stack_activation("scale", sublayer_type="ln2"),
    "logits of the stream": lambda cache: cache.logit_attrs(cache.accumulated_resid(), tokens=7),
    "logit differences": lambda cache: cache.logit_attrs(
        cache.decompose_resid(pos_slice=-1),
        pos_slice=-1,
        tokens=torch.tensor([3, 9]),
        incorrect_tokens=torch.tensor([5, 8]),
    ),
    "logits of heads": lambda cache: cache.logit_attrs(
        cache.stack_head_results(incl_remainder=True), tokens=4, incorrect_tokens=11
    ),
    "logits of one row": lambda cache: cache.logit_attrs(cache.decompose_resid()[:, :1], tokens=7, batch_slice=(0, 1)),
    "a projection": lambda cache: cache.stack_neuron_results(
        2, pos_slice=-1, project_output_onto=cache.model.tokens_to_residual_directions(9)
    ),
    "one row": lambda cache: cache.apply_slice_to_batch_dim(1).accumulated_resid(),
    "some rows": lambda cache: cache.apply_slice_to_batch_dim((0, 1)).decompose_resid(apply_ln=True),
}


@lru_cache(maxsize=None)
@torch.no_grad()
def run(model: Any) -> Any:
    tokens = torch.randint(5, 400, (2, 9), generator=torch.Generator().manual_seed(0))
    return model.run_with_cache(tokens)[1]


def fresh(cache: Any) -> Any:
    """A cache of its own over the same run: compute_head_results adds to it."""
    return type(cache)(dict(cache.cache_dict), cache.model)


def outcome(call: Call, cache: Any) -> Any:
    try:
        return call(cache)
    except (AssertionError, KeyError, ValueError, AttributeError, NotImplementedError, RuntimeError) as failure:
        return failure


@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_a_method_gives_what_theirs_gives(pair: Pair, call: str) -> None:
    found, expected = pair.both(lambda model: outcome(CALLS[call], fresh(run(model))))
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), (found, expected)
    else:
        assert not isinstance(found, Exception), found
        assert_close(found, expected)


@torch.no_grad()
def test_methods_work_on_a_run_without_batch_axis(pair: Pair) -> None:
    names = lambda name: "attn.q_norm" not in name and "attn.k_norm" not in name  # noqa: E731  theirs fails on these
    calls = ("the stream, normalized", "components", "heads and the rest", "logits of heads")

    def run(model: Any) -> list[Any]:
        _, cache = model.run_with_cache(random_tokens(pair)[:1], remove_batch_dim=True, names_filter=names)
        return [outcome(CALLS[call], cache) for call in calls]

    for mine, theirs in zip(*pair.both(run)):
        if isinstance(theirs, Exception):
            assert isinstance(mine, type(theirs))
        else:
            assert_close(mine, theirs)


@torch.no_grad()
def test_what_is_decomposed_adds_up_to_the_stream(pair: Pair) -> None:
    _, cache = pair.ours.run_with_cache(random_tokens(pair))
    final = cache["resid_post", pair.ours.cfg.n_layers - 1]
    assert_close(cache.decompose_resid().sum(0), final)
    if not pair.ours.cfg.use_normalization_before_and_after:  # else a head's share goes through a norm of the sum
        assert_close(cache.get_full_resid_decomposition(expand_neurons=False).sum(0), final)


@torch.no_grad()
def test_cached_head_results_are_used_where_they_were_computed(pair: Pair) -> None:
    pair.switch("attn_result")
    run = lambda model: model.run_with_cache(random_tokens(pair))[1].stack_head_results(apply_ln=True)  # noqa: E731
    assert_close(*pair.both(run))


@torch.no_grad()
def test_a_cache_is_saved_and_loaded(pair: Pair, tmp_path: Path) -> None:
    """With its model, as theirs is, so that every method still works."""
    _, cache = pair.ours.run_with_cache(random_tokens(pair))
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert_same_cache(loaded, cache, tolerance=0)
    for call in ("a short name", "the stream, normalized", "heads and the rest", "logits of heads"):
        assert_close(CALLS[call](loaded), CALLS[call](cache), tolerance=0)


@torch.no_grad()
def test_values_of_a_cache_are_saved_and_loaded_without_the_model(processed_pair: Pair, tmp_path: Path) -> None:
    _, cache = processed_pair.ours.run_with_cache(random_tokens(processed_pair))
    torch.save(cache.cache_dict, tmp_path / "values.pt")
    assert_same_cache(torch.load(tmp_path / "values.pt", weights_only=True), cache, tolerance=0)
