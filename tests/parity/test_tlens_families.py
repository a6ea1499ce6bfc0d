"""The main promises on each further family that TransformerLens loads: the quick part of what `make test-all` holds there.

test_tlens_reads.py and its like run on all of them too, marked slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hub import FURTHER_NAMES
from tests.parity.conftest import served, short
from tests.parity.pairs import Pair, assert_close, assert_same_cache, assert_same_gradients, random_tokens, shared_pair
from tests.parity.test_tlens_generate import GREEDY
from tests.parity.test_tlens_weights import learned
from tests.parity.test_tlens_writes import EDITS, assert_edits_are_followed_alike, names_of, switch_on

CASES = [(name, processed) for processed in (True, False) for name in served(processed) if name in FURTHER_NAMES]


@pytest.fixture(params=CASES, ids=lambda case: f"{short(case[0])}-{'processed' if case[1] else 'raw'}")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = shared_pair(*request.param)
    yield pair
    pair.reset()


def test_logits_loss_and_every_name_with_its_gradient_are_theirs(pair: Pair) -> None:
    run = lambda model: model.run_with_cache(random_tokens(pair), return_type="loss", incl_bwd=True)  # noqa: E731
    (loss, cache), (their_loss, their_cache) = pair.both(run)
    assert_close(loss, their_loss)
    assert_same_gradients(pair, cache, their_cache)
    assert_close(*pair.both(lambda model: model(random_tokens(pair)).detach()))


@torch.no_grad()
def test_names_of_all_switches_are_theirs(pair: Pair) -> None:
    pair.switch(*pair.switches[:3])
    (_, cache), (_, their_cache) = pair.both(lambda model: model.run_with_cache(random_tokens(pair)))
    assert_same_cache(cache, their_cache)


@torch.no_grad()
def test_an_edit_at_every_name_is_followed_alike(pair: Pair) -> None:
    switch_on(pair)
    kinds = ["replaced", "scaled"]
    assert set(kinds) <= EDITS.keys()
    assert_edits_are_followed_alike(pair, [(name, kinds[i % 2]) for i, name in enumerate(names_of(pair))])


@torch.no_grad()
def test_experts_that_a_hook_picks_are_run(pair: Pair) -> None:
    n, name = pair.theirs.cfg.num_experts, "blocks.1.mlp.hook_expert_indices"
    if n is None:
        pytest.skip("the family has no experts")
    if pair.name == "openai/gpt-oss-20b":
        pytest.skip("there TransformerLens gives an expert that a hook picks the weight 0; ours gives it its slot's weight")
    hooks = [(name, lambda picked, hook: (picked + 1) % n)]
    found, expected = pair.both(lambda model: model.run_with_hooks(random_tokens(pair), fwd_hooks=hooks))
    assert_close(found, expected)
    assert (found - pair.ours(random_tokens(pair))).abs().max() > 0.01 * found.abs().max()


@torch.no_grad()
def test_left_padded_texts_continue_as_hugging_face_continues_them(pair: Pair) -> None:
    texts = ["Hello", "When Mary and John went to the store, John gave a drink to", "The cat sat on the mat"]
    settings = dict(max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens")
    found, expected = pair.both(lambda model: model.generate(texts, **settings))
    assert found.tolist() == expected.tolist()
    model = AutoModelForCausalLM.from_pretrained(pair.name, attn_implementation="eager")
    for row, text in zip(found, texts):
        tokens = pair.ours.to_tokens(text)
        alone = model.generate(tokens, **GREEDY | dict(max_new_tokens=6))[0]
        assert row[-len(alone) :].tolist() == alone.tolist()


def test_every_weight_is_theirs_by_name(pair: Pair) -> None:
    found, expected = learned(pair.ours), learned(pair.theirs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value.detach(), name)


def test_the_reference_that_is_left_out_is_wrong_and_ours_is_not() -> None:
    """TransformerLens folds value biases into the output bias, although a sink takes a share of each row of the pattern."""
    for name in set(FURTHER_NAMES) - set(served(True)):
        pair, tokens = shared_pair(name, True), random_tokens(shared_pair(name, True))
        with torch.no_grad():
            expected: Any = AutoModelForCausalLM.from_pretrained(name)(tokens).logits
            expected = expected - expected.mean(-1, keepdim=True)
            assert_close(pair.ours(tokens), expected)
            assert (pair.theirs(tokens) - expected).abs().max() > 0.01 * expected.abs().max()
