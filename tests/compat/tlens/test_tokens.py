"""The tokenizer methods: what they refuse, and what they leave as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from compat.tlens.errors import TokenOutOfRange
from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from compat.tlens.tokens import TokenMethods, check_token_ids
from engine.errors import BadInput, CompatError


class Model(TokenMethods):
    """Nothing but a config, a tokenizer and an unembedding."""

    def __init__(self, tokenizer_name: str | None = "gpt2") -> None:
        self.cfg = HookedTransformerConfig(d_model=6, d_head=3, n_layers=1, n_ctx=9, device="cpu")
        self.tokenizer = None
        if tokenizer_name:
            self.set_tokenizer(AutoTokenizer.from_pretrained(tokenizer_name))
        self.W_U = torch.arange(12.0).reshape(6, 2)


def test_a_tokenizer_sets_a_vocabulary_size_that_is_not_set() -> None:
    model = Model()
    assert model.cfg.d_vocab == model.cfg.d_vocab_out == len(model.tokenizer)


def test_a_thing_that_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(AssertionError, match="SimpleNamespace"):
        Model().set_tokenizer(SimpleNamespace())


def test_without_a_tokenizer_text_is_refused() -> None:
    model = Model(None)
    for method in (model.to_tokens, model.to_str_tokens):
        with pytest.raises(AssertionError, match="without a tokenizer"):
            method("a")
    with pytest.raises(AssertionError, match="without a tokenizer"):
        model.to_string([1])


def test_a_local_choice_of_padding_side_and_bos_is_gone_afterwards() -> None:
    model = Model()
    before = model.cfg.default_prepend_bos, model.tokenizer.padding_side
    model.to_tokens(["one two", "a"], prepend_bos=not before[0], padding_side="left")
    with pytest.raises(ValueError, match="type `str`"):
        model.to_tokens(3, prepend_bos=not before[0], padding_side="left")
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == before


def test_a_long_text_is_cut_to_the_context_unless_told_not_to() -> None:
    model = Model()
    assert model.to_tokens("Hello world! " * 30).shape == (1, 9)
    assert model.to_tokens("Hello world! " * 30, truncate=False).shape[1] > 30


def test_no_tokens_at_all_are_still_integers() -> None:
    tokens = Model("Qwen/Qwen3-0.6B").to_tokens("", prepend_bos=False)
    assert tokens.shape == (1, 0) and tokens.dtype == torch.long


def test_several_tokens_are_no_single_token() -> None:
    with pytest.raises(AssertionError, match="not a single token"):
        Model().to_single_token("Hello world and all")


def test_ids_of_the_vocabulary_pass() -> None:
    check_token_ids(torch.tensor([[0, 4]]), 5)
    check_token_ids(torch.zeros(1, 0, dtype=torch.long), 5)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.tensor([[0, 1], [7, 2]]), "from 0 to 4 .*largest here is 7, at row 1, position 0"),
        (torch.tensor([3, -2]), "smallest here is -2, at position 1"),
        (torch.tensor([[[5]]]), "axis 0 0, axis 1 0, axis 2 0"),
    ],
)
def test_ids_out_of_range_are_refused_with_size_and_place(tokens: torch.Tensor, said: str) -> None:
    with pytest.raises(TokenOutOfRange, match=said) as caught:
        check_token_ids(tokens, 5)
    assert isinstance(caught.value, IndexError | CompatError)


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(BadInput, match="float32"):
        check_token_ids(torch.zeros(1, 2), 5)
