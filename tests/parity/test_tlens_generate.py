"""Generation: TransformerLens' ids, texts and logits, greedy and seeded, and hooks that fire as often alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compat.tlens.utils import get_attention_mask
from tests.parity.pairs import Pair, assert_close, random_tokens

GREEDY = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)  # for Hugging Face
TEXTS = ["Hello", "When Mary and John went to the store, John gave a drink to", "The cat sat on the mat"]
HOW: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "sampled": {},
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.8, temperature=0.9),
    "penalised": dict(freq_penalty=1.2),
    "greedy without a cache": dict(use_past_kv_cache=False, do_sample=False),
}


def hugging_face(pair: Pair) -> Any:
    """The raw model, with the one attention function of transformers that heeds every family's soft cap."""
    return AutoModelForCausalLM.from_pretrained(pair.name, attn_implementation="eager")


def generate(pair: Pair, input: Any, **arguments: Any) -> tuple[Any, Any]:
    arguments = dict(max_new_tokens=6, verbose=False, stop_at_eos=False) | arguments
    return pair.both(lambda model: model.generate(input, **arguments))


def assert_same_ids(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.tolist() == expected.tolist() if isinstance(expected, Tensor) else found == expected


@pytest.mark.parametrize("how", HOW)
def test_ids_are_continued_by_the_same_ids(pair: Pair, how: str) -> None:
    assert_same_ids(*generate(pair, random_tokens(pair, rows=3, pos=7), **HOW[how]))


@pytest.mark.parametrize("how", ["greedy", "sampled", "greedy without a cache"])
def test_texts_of_different_lengths_are_continued_by_the_same_ids(pair: Pair, how: str) -> None:
    assert_same_ids(*generate(pair, TEXTS, return_type="tokens", **HOW[how]))


def test_what_continues_a_text_does_not_depend_on_the_texts_beside_it(processed_pair: Pair) -> None:
    together = processed_pair.ours.generate(
        TEXTS, max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens"
    )
    for row, text in zip(together, TEXTS):
        alone = processed_pair.ours.generate(
            text, max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens"
        )
        assert row[-alone.shape[1] :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("return_type", ["input", "str", "tokens", "embeds"])
@pytest.mark.parametrize("kind", ["text", "texts", "one text in a list", "ids"])
def test_every_return_type_gives_the_same(processed_pair: Pair, kind: str, return_type: str) -> None:
    inputs = {"text": TEXTS[2], "texts": TEXTS, "one text in a list": TEXTS[:1], "ids": random_tokens(processed_pair)}
    found, expected = generate(processed_pair, inputs[kind], return_type=return_type, max_new_tokens=4)
    if isinstance(expected, Tensor) and expected.is_floating_point():
        assert_close(found, expected)
    else:
        assert_same_ids(found, expected)


@pytest.mark.parametrize("prepend_bos", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_bos_and_padding_side_are_heeded_alike(processed_pair: Pair, prepend_bos: bool, side: str) -> None:
    for input in (TEXTS[1], TEXTS):
        arguments = dict(prepend_bos=prepend_bos, padding_side=side, return_type="tokens", do_sample=False)
        assert_same_ids(*generate(processed_pair, input, **arguments))


def test_generation_stops_at_the_same_tokens(processed_pair: Pair) -> None:
    """Stop tokens are chosen among the ids that greedy generation comes to, so that rows finish at different steps."""
    tokens = random_tokens(processed_pair, rows=3, pos=5)
    free = processed_pair.theirs.generate(tokens, max_new_tokens=8, do_sample=False, verbose=False, stop_at_eos=False)[
        :, 5:
    ]
    for stop in (
        free[0, 2].item(),
        [free[0, 1].item(), free[1, 3].item()],
        [row[row.shape[0] // 2].item() for row in free],
    ):
        arguments = dict(do_sample=False, stop_at_eos=True, eos_token_id=stop)
        found, expected = generate(processed_pair, tokens, **arguments)
        assert_same_ids(found, expected)
        assert_same_ids(*generate(processed_pair, tokens, use_past_kv_cache=False, **arguments))
    assert found.shape[1] < 13  # the last of them ends every row early


def test_embeddings_are_continued_alike(pair: Pair) -> None:
    """Held to TransformerLens without a cache: with one, it puts learned positions wrong after the first step."""
    embeddings = pair.theirs.embed(random_tokens(pair)).detach()
    settings = dict(max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False)
    for return_type in ("tokens", "str", "embeds"):
        expected = pair.theirs.generate(embeddings, return_type=return_type, use_past_kv_cache=False, **settings)
        for use_cache in (True, False):
            found = pair.ours.generate(embeddings, return_type=return_type, use_past_kv_cache=use_cache, **settings)
            if return_type == "embeds":
                assert_close(found, expected)
            else:
                assert_same_ids(found, expected)


def test_generation_from_bos_alone_is_hugging_faces(pair: Pair) -> None:
    """Where BOS is the padding token too, TransformerLens takes the prompt for padding and hides it."""
    bos = pair.ours.tokenizer.bos_token_id
    expected = hugging_face(pair).generate(torch.tensor([[bos]]), attention_mask=torch.ones(1, 1), **GREEDY)
    settings = dict(max_new_tokens=8, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens")
    assert pair.ours.generate(torch.tensor([[bos]]), **settings).tolist() == expected.tolist()
    if pair.ours.cfg.default_prepend_bos:
        assert pair.ours.generate("", **settings).tolist() == expected.tolist()
        assert pair.ours.generate([""], **settings).tolist() == expected.tolist()


def test_logits_of_each_step_are_theirs(pair: Pair) -> None:
    for input in (random_tokens(pair), TEXTS):
        arguments = dict(output_logits=True, return_dict_in_generate=True, do_sample=False)
        found, expected = generate(pair, input, **arguments)
        assert type(found) is type(expected)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(list(found.logits), list(expected.logits))


def test_steering_hooks_act_at_every_step(pair: Pair) -> None:
    hooks = [
        ("blocks.1.hook_resid_pre", lambda x, hook: x + 0.6),
        ("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern * 0.7),
        ("blocks.2.hook_mlp_out", lambda x, hook: x * 1.5),
    ]

    def run(model: Any, **arguments: Any) -> Tensor:
        with model.hooks(fwd_hooks=hooks):
            return model.generate(random_tokens(pair), max_new_tokens=8, verbose=False, stop_at_eos=False, **arguments)

    plain = pair.ours.generate(random_tokens(pair), max_new_tokens=8, verbose=False, stop_at_eos=False, do_sample=False)
    for arguments in (dict(do_sample=False), {}, dict(use_past_kv_cache=False, do_sample=False)):
        found, expected = pair.both(lambda model: run(model, **arguments))
        assert_same_ids(found, expected)
    assert found.tolist() != plain.tolist()


def test_a_hook_that_edits_the_last_logits_decides_what_is_generated(pair: Pair) -> None:
    def force(logits: Tensor, hook: Any) -> Tensor:
        logits[:, -1, 17] = 100.0
        return logits

    def run(model: Any) -> Tensor:
        with model.hooks(fwd_hooks=[("unembed.hook_out", force)]):
            return model.generate(
                random_tokens(pair), max_new_tokens=3, verbose=False, stop_at_eos=False, do_sample=False
            )

    found, expected = pair.both(run)
    assert_same_ids(found, expected)
    assert (found[:, -3:] == 17).all()


@pytest.mark.parametrize("use_cache", [True, False])
def test_hooks_fire_as_often_and_see_the_same_values(pair: Pair, use_cache: bool) -> None:
    tokens = random_tokens(pair, pos=7)

    def run(model: Any) -> dict[str, list[Tensor]]:
        seen: dict[str, list[Tensor]] = {name: [] for name in model.hook_dict}
        hooks = [(lambda name: True, lambda value, hook: seen[hook.name].append(value.clone()))]
        with model.hooks(fwd_hooks=hooks):
            model.generate(
                tokens, max_new_tokens=3, verbose=False, stop_at_eos=False, do_sample=False, use_past_kv_cache=use_cache
            )
        return seen

    found, expected = pair.both(run)
    assert {name: len(values) for name, values in found.items()} == {
        name: len(values) for name, values in expected.items()
    }
    for name, values in expected.items():
        assert_close(found[name], values, name)


def test_a_stream_comes_in_the_same_pieces(processed_pair: Pair) -> None:
    for input in (TEXTS[1], random_tokens(processed_pair)):
        for arguments in ({}, dict(use_past_kv_cache=False, do_sample=False), dict(max_tokens_per_yield=3, top_k=4)):
            arguments = dict(max_new_tokens=8, verbose=False, stop_at_eos=False) | arguments
            found, expected = processed_pair.both(lambda model: list(model.generate_stream(input, **arguments)))
            assert [piece.tolist() for piece in found] == [piece.tolist() for piece in expected]


def test_hooks_fire_alike_in_a_stream(processed_pair: Pair) -> None:
    tokens = random_tokens(processed_pair)

    def run(model: Any) -> dict[str, list[tuple]]:
        seen: dict[str, list[tuple]] = {name: [] for name in model.hook_dict}
        with model.hooks([(lambda name: True, lambda value, hook: seen[hook.name].append(tuple(value.shape)))]):
            list(model.generate_stream(tokens, max_new_tokens=3, verbose=False, stop_at_eos=False, do_sample=False))
        return seen

    found, expected = processed_pair.both(run)
    assert found == expected


def test_greedy_generation_is_hugging_faces(pair: Pair) -> None:
    tokens = random_tokens(pair, rows=2, pos=7)
    expected = hugging_face(pair).generate(tokens, attention_mask=torch.ones_like(tokens), **GREEDY)
    settings = dict(max_new_tokens=8, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens")
    assert pair.ours.generate(tokens, **settings).tolist() == expected.tolist()

    ids = pair.ours.to_tokens(TEXTS, padding_side="left")
    mask = get_attention_mask(pair.ours.tokenizer, ids, pair.ours.cfg.default_prepend_bos, padding_side="left")
    expected = hugging_face(pair).generate(ids, attention_mask=mask, **GREEDY)
    assert pair.ours.generate(TEXTS, **settings).tolist() == expected.tolist()
