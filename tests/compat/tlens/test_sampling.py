"""Sampling on its own: when a generation ends, and what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compat.tlens.errors import BadArgument
from compat.tlens.sampling import Prompt, Sampling, read_prompt

PROMPT = Prompt(torch.tensor([[1, 2], [3, 4]]), None, torch.tensor([[0, 1], [1, 1]]), "tokens")


def choose(*ids: int) -> torch.Tensor:
    """Logits `[batch, 10]` whose largest entries are these ids."""
    return torch.nn.functional.one_hot(torch.tensor(ids), 10).float()


def greedy(**arguments: Any) -> Sampling:
    return Sampling(PROMPT, None, **dict(do_sample=False, eos_token_id=9) | arguments)


def test_a_finished_row_is_filled_with_eos() -> None:
    sampling = greedy(max_new_tokens=3)
    sampling.next(choose(9, 5))
    sampling.next(choose(6, 6))
    assert not sampling.done
    sampling.next(choose(7, 9))
    assert sampling.done
    assert sampling.tokens.tolist() == [[1, 2, 9, 9, 9], [3, 4, 5, 6, 9]]


def test_a_run_is_done_when_every_row_is_finished() -> None:
    sampling = greedy(max_new_tokens=100)
    sampling.next(choose(9, 9))
    assert sampling.done


def test_stop_tokens_mean_nothing_without_stop_at_eos() -> None:
    sampling = greedy(max_new_tokens=2, stop_at_eos=False)
    sampling.next(choose(9, 9))
    assert not sampling.done
    assert sampling.next(choose(3, 3)).tolist() == [3, 3]


def test_the_mask_grows_by_a_one_for_each_chosen_id() -> None:
    sampling = greedy()
    sampling.next(choose(1, 1))
    assert sampling.mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_no_new_tokens_at_all_leave_the_prompt() -> None:
    sampling = greedy(max_new_tokens=0)
    assert sampling.done
    assert sampling.result(None, None).equal(PROMPT.tokens)


def test_logits_handed_back_are_not_changed_by_a_penalty() -> None:
    sampling = greedy(do_sample=True, freq_penalty=2.0, output_logits=True)
    logits = choose(1, 3)
    sampling.next(logits)
    assert sampling.result(None, None).logits[0].equal(choose(1, 3))


def test_stopping_needs_an_eos_id() -> None:
    with pytest.raises(BadArgument, match="eos_token_id"):
        Sampling(PROMPT, None)
    with pytest.raises(BadArgument, match="eos_token_id"):
        Sampling(PROMPT, SimpleNamespace(eos_token_id=None))


def test_ids_without_a_tokenizer_have_no_mask() -> None:
    model = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(device="cpu", default_prepend_bos=True))
    prompt = read_prompt(model, PROMPT.tokens)
    assert prompt.mask is None and prompt.return_type == "tokens"


def test_text_needs_a_tokenizer_both_ways() -> None:
    model = SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(device="cpu", default_prepend_bos=True))
    with pytest.raises(AssertionError, match="tokenizer"):
        read_prompt(model, "Hello")
    with pytest.raises(AssertionError, match="tokenizer"):
        Sampling(read_prompt(model, PROMPT.tokens, "str"), None, stop_at_eos=False).result(None, None)
