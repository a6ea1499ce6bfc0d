"""What generation does beside the forward, against TransformerLens: both are given the same logits, step by step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoTokenizer

from compat.tlens.sampling import Sampling, Stream, accept_generation_kwargs, read_prompt
from compat.tlens.utils import LocallyOverridenDefaults

STEPS = 8
EOS = 402
TEXTS = ["When Mary and John", "Hello", "The cat sat on the mat"]
INPUTS: dict[str, Any] = {
    "text": "Hello world!",
    "nothing": "",
    "list of one": ["Hello"],
    "texts": TEXTS,
    "ids": torch.tensor([[5, 6, 7, 5], [9, 9, 8, 402]]),
    "embeddings": torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)),
}
HOW: dict[str, dict[str, Any]] = {
    "default": {},
    "greedy": dict(do_sample=False),
    "cold": dict(temperature=0.0),
    "warm": dict(temperature=1.7),
    "top_k": dict(top_k=5),
    "top_k beyond the vocabulary": dict(top_k=10_000),
    "top_p": dict(top_p=0.7, temperature=0.8),
    "penalty": dict(freq_penalty=1.5),
    "penalty greedy": dict(freq_penalty=1.5, do_sample=False),
    "never stops": dict(stop_at_eos=False),
    "another eos": dict(eos_token_id=11),
    "several eos": dict(eos_token_id=[11, 12, 13]),
    "left": dict(padding_side="left"),
    "no bos": dict(prepend_bos=False),
    "one step": dict(max_new_tokens=1),
}


@functools.cache
def model() -> Any:
    """A TransformerLens model; only its tokenizer, embedding and generate are used."""
    cfg = HookedTransformerConfig(
        d_model=8, d_head=4, n_layers=1, n_ctx=40, d_vocab=403, act_fn="relu", device="cpu", seed=0
    )
    return HookedTransformer(cfg, AutoTokenizer.from_pretrained("gpt2"))


def logits_of_each_step(batch: int) -> list[torch.Tensor]:
    """Logits `[batch, d_vocab]` a step, in which rows come to stop tokens at different steps."""
    generator = torch.Generator().manual_seed(batch)
    steps = [3 * torch.randn(batch, 403, generator=generator) for _ in range(STEPS)]
    for row in range(batch):
        for stop in (EOS, 11, 13):
            steps[2 + row][row, stop] += 12
    return steps


def batch_size(input: Any) -> int:
    return 1 if isinstance(input, str) else len(input)


def answering(steps: list[torch.Tensor]) -> Any:
    """A patch of the model's forward that answers with each step's logits in turn."""
    answers: Iterator[torch.Tensor] = iter(steps)
    return mock.patch.object(model(), "forward", lambda *args, **kwargs: next(answers)[:, None])


def theirs(input: Any, **arguments: Any) -> Any:
    with answering(logits_of_each_step(batch_size(input))):
        torch.manual_seed(0)
        return model().generate(input, **{"max_new_tokens": STEPS, "verbose": False} | arguments)


def ours(
    input: Any,
    return_type: str = "input",
    prepend_bos: bool | None = None,
    padding_side: Any = None,
    max_new_tokens: int = STEPS,
    **arguments: Any,
) -> Any:
    steps = iter(logits_of_each_step(batch_size(input)))
    with LocallyOverridenDefaults(model(), prepend_bos=prepend_bos, padding_side=padding_side):
        prompt = read_prompt(model(), input, return_type, prepend_bos, padding_side)
        sampling = Sampling(prompt, model().tokenizer, max_new_tokens, **arguments)
        torch.manual_seed(0)
        while not sampling.done:
            sampling.next(next(steps))
        return sampling.result(model().tokenizer, model().embed)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()
    else:
        assert found == expected


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("return_type", ["input", "str", "tokens", "embeds"])
def test_a_seeded_run_gives_the_same_answer(kind: str, how: str, return_type: str) -> None:
    arguments = HOW[how] | dict(return_type=return_type)
    assert_same(ours(INPUTS[kind], **arguments), theirs(INPUTS[kind], **arguments))


@pytest.mark.parametrize("kind", INPUTS)
def test_random_numbers_are_used_up_alike(kind: str) -> None:
    theirs(INPUTS[kind])
    expected = torch.rand(3)
    ours(INPUTS[kind])
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("kind", INPUTS)
def test_logits_come_back_the_same_when_asked_for(kind: str) -> None:
    found = ours(INPUTS[kind], output_logits=True)
    expected = theirs(INPUTS[kind], output_logits=True, return_dict_in_generate=True)
    assert type(found) is type(expected)
    assert found.sequences.equal(expected.sequences)
    assert len(found.logits) == len(expected.logits)
    assert all(one.equal(other) for one, other in zip(found.logits, expected.logits, strict=True))


def test_unknown_keywords_are_warned_of_alike() -> None:
    for accept in (accept_generation_kwargs, lambda kwargs: theirs("Hello", **kwargs)):
        with pytest.warns(UserWarning, match="no_such"):
            accept(dict(no_such=1, output_logits=False))


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "embeddings", "list of one"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_mask_of_each_step_is_the_same(kind: str, side: Any) -> None:
    seen = []
    steps = iter(logits_of_each_step(batch_size(INPUTS[kind])))

    def forward(*args: Any, attention_mask: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(attention_mask)
        return next(steps)[:, None]

    with mock.patch.object(model(), "forward", forward):
        model().generate(INPUTS[kind], max_new_tokens=2, verbose=False, stop_at_eos=False, padding_side=side)
    with LocallyOverridenDefaults(model(), padding_side=side):
        sampling = Sampling(read_prompt(model(), INPUTS[kind], padding_side=side), None, stop_at_eos=False)
    for expected, logits in zip(seen, logits_of_each_step(batch_size(INPUTS[kind])), strict=False):
        assert (sampling.mask is None) == (expected is None)
        assert expected is None or sampling.mask.equal(expected)
        sampling.next(logits)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(input=[1, 2]),
        dict(input=3),
        dict(input="a", return_type="text"),
        dict(input="a", top_k=0),
        dict(input="a", top_p=1.5),
        dict(input="a", prepend_bos="yes"),
    ],
)
def test_wrong_arguments_are_assertion_errors_on_both(wrong: dict[str, Any]) -> None:
    for generate in (ours, theirs):
        with mock.patch(f"{__name__}.batch_size", return_value=1), pytest.raises(AssertionError):
            generate(**wrong)


@pytest.mark.parametrize("least", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["text", "ids"])
@pytest.mark.parametrize("stop_at_eos", [True, False])
def test_a_stream_comes_in_the_same_pieces(least: int, kind: str, stop_at_eos: bool) -> None:
    steps = logits_of_each_step(batch_size(INPUTS[kind]))
    with answering(steps):
        torch.manual_seed(0)
        expected = list(
            model().generate_stream(
                INPUTS[kind], STEPS, least, stop_at_eos=stop_at_eos, verbose=False, use_past_kv_cache=False
            )
        )
    torch.manual_seed(0)
    sampling = Sampling(read_prompt(model(), INPUTS[kind]), model().tokenizer, STEPS, stop_at_eos=stop_at_eos)
    stream, found = Stream(sampling.prompt.tokens, least), []
    for logits in steps:
        found.append(stream.push(sampling.next(logits)))
        if sampling.done:
            break
    found.append(stream.rest())
    assert [piece.tolist() for piece in found if piece is not None] == [piece.tolist() for piece in expected]
