"""Two real trained models: the numbers, edits, gradients and texts of TransformerLens."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from demo.real_models import GEMMA3, SMOLLM2
from tests.hub import ensure_real
from tests.parity.pairs import Pair, assert_close, assert_same_cache, assert_same_gradients, new_pair

pytestmark = pytest.mark.slow

TEXTS = [
    "When Mary and John went to the store, John gave a drink to",
    "The Eiffel Tower is in the city of",
    "Two plus two is",
]


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3], ids=lambda name: name.rpartition("/")[2])
def model_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ensure_real(request.param)
    yield new_pair(request.param)
    gc.collect()


@pytest.fixture
def pair(model_pair: Pair) -> Iterator[Pair]:
    yield model_pair
    model_pair.reset()


@torch.no_grad()
def test_logits_and_every_cached_name_are_theirs(pair: Pair) -> None:
    (logits, cache), (their_logits, their_cache) = pair.both(lambda model: model.run_with_cache(TEXTS[0]))
    assert_close(logits, their_logits)
    assert torch.equal(logits.argmax(-1), their_logits.argmax(-1))
    assert pair.ours.to_string(logits[0, -1].argmax()).strip() == "Mary"
    assert_same_cache(cache, their_cache)


@torch.no_grad()
def test_losses_of_padded_texts_are_theirs(pair: Pair) -> None:
    for side in ("left", "right"):
        arguments = dict(return_type="loss", loss_per_token=True, padding_side=side)
        assert_close(*pair.both(lambda model: model(TEXTS, **arguments)))


@torch.no_grad()
def test_what_switches_turn_on_is_theirs(pair: Pair) -> None:
    pair.switch("attn_result", "split_qkv_input", "hook_mlp_in")
    names = lambda name: name.startswith(("blocks.7.", "blocks.12.", "ln_final"))  # noqa: E731
    run = lambda model: model.run_with_cache(TEXTS[2], names_filter=names, return_type="loss")  # noqa: E731
    (loss, cache), (their_loss, their_cache) = pair.both(run)
    assert_close(loss, their_loss)
    assert_same_cache(cache, their_cache)


@torch.no_grad()
def test_edits_are_followed_alike(pair: Pair) -> None:
    def ablate(z: Tensor, hook: Any) -> Tensor:
        z[:, :, 2] = 0
        return z

    def steer(x: Tensor, hook: Any) -> None:
        x[:, -1] += 2.0

    hooks = [
        ("blocks.4.attn.hook_z", ablate),
        ("blocks.9.hook_resid_mid", steer),
        ("blocks.12.attn.hook_pattern", ablate),
    ]
    names = lambda name: "resid" in name or name.endswith(("hook_pattern", "hook_post"))  # noqa: E731

    def run(model: Any) -> Any:
        with model.hooks(hooks):
            return model.run_with_cache(TEXTS[0], names_filter=names)

    (logits, cache), (their_logits, their_cache) = pair.both(run)
    assert_close(logits, their_logits)
    assert_same_cache(cache, their_cache)


def test_gradients_of_every_cached_name_are_theirs(pair: Pair) -> None:
    run = lambda model: model.run_with_cache(TEXTS[0], return_type="loss", incl_bwd=True)[1]  # noqa: E731
    found, expected = pair.both(run)
    assert_same_gradients(pair, found, expected, tolerance=1e-4)
    for model in (pair.ours, pair.theirs):
        model.zero_grad(set_to_none=True)


@torch.no_grad()
def test_attributions_are_theirs(pair: Pair) -> None:
    def run(model: Any) -> Any:
        _, cache = model.run_with_cache(TEXTS[0])
        answers = [model.to_single_token(" Mary"), model.to_single_token(" John")]
        stack, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
        return labels, cache.logit_attrs(stack, tokens=answers[0], incorrect_tokens=answers[1], pos_slice=-1)

    assert_close(*pair.both(run))


@pytest.mark.parametrize("input", [TEXTS[0], TEXTS])
def test_greedy_generation_gives_the_same_texts(pair: Pair, input: Any) -> None:
    found, expected = pair.both(lambda model: model.generate(input, 10, do_sample=False, verbose=False))
    assert found == expected


def test_seeded_sampling_gives_the_same_text(pair: Pair) -> None:
    found, expected = pair.both(lambda model: model.generate(TEXTS[1], 10, top_k=20, temperature=0.8, verbose=False))
    assert found == expected


@torch.no_grad()
def test_a_prompt_longer_than_the_sliding_window_is_read_alike(pair: Pair) -> None:
    if pair.theirs.cfg.window_size is None:
        pytest.skip("no layer has a window")
    tokens = pair.theirs.to_tokens(" ".join(TEXTS) * 30)[:, : pair.theirs.cfg.window_size + 40]
    names = ["blocks.4.attn.hook_pattern", "blocks.5.attn.hook_pattern", "blocks.17.hook_resid_post"]
    run = lambda model: model.run_with_cache(tokens, names_filter=names, return_type=None)[1]  # noqa: E731
    found, expected = pair.both(run)
    assert_same_cache(found, expected)
    assert (expected[names[0]][0, 0, -1, :40] == 0).all() and (expected[names[1]][0, 0, -1, :40] > 0).any()
