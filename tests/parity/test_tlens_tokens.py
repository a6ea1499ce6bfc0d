"""The tokenizer methods against TransformerLens: exactly the same ids, texts and positions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig as OurConfig
from compat.tlens.tokens import TokenMethods
from tests.hub import NAMES

TEXTS = [
    "",
    " ",
    "Hello world!",
    "When Mary and John went to the store, John gave a drink to Mary.",
    "  leading and trailing  ",
    "two\n\nlines\tand a tab",
    "naïve café, 東京 🙂 \u200b ﬁ",
    "<|endoftext|>",
    "one <|endoftext|> two <bos> three",
    "long " * 200,
]
LISTS = [["Hello"], ["Hello world!", ""], ["a", "When Mary and John went to the store", "naïve 🙂"], TEXTS]
ARCHITECTURES = [None, "OlmoForCausalLM"]




class Ours(TokenMethods):
    def __init__(self, cfg: OurConfig, tokenizer: PreTrainedTokenizerBase, default_padding_side: Any) -> None:
        self.cfg = cfg
        self.set_tokenizer(tokenizer, default_padding_side)


@functools.cache
def pair(name: str, default_padding_side: str | None = None, architecture: str | None = None) -> tuple[Any, Any]:
    """(ours, TransformerLens') with a tokenizer of their own each and the same unembedding."""
    sizes: dict[str, Any] = dict(
        d_model=6, d_head=3, n_layers=1, n_ctx=20, device="cpu", act_fn="relu", original_architecture=architecture
    )
    theirs = HookedTransformer(
        HookedTransformerConfig(**sizes), AutoTokenizer.from_pretrained(name), default_padding_side=default_padding_side
    )
    ours = Ours(OurConfig(**sizes), AutoTokenizer.from_pretrained(name), default_padding_side)
    ours.W_U = theirs.W_U
    return ours, theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tokenizer_is_set_up_the_same(name: str, side: str | None, architecture: str | None) -> None:
    ours, theirs = pair(name, side, architecture)
    for attribute in ("padding_side", "bos_token", "eos_token", "pad_token", "bos_token_id", "pad_token_id"):
        assert getattr(ours.tokenizer, attribute) == getattr(theirs.tokenizer, attribute)
    for field in ("tokenizer_prepends_bos", "d_vocab", "d_vocab_out"):
        assert getattr(ours.cfg, field) == getattr(theirs.cfg, field)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("prepend_bos", [None, True, False])
def test_ids_are_the_same(name: str, architecture: str | None, side: str | None, prepend_bos: bool | None) -> None:
    ours, theirs = pair(name, None, architecture)
    for input in [*TEXTS, *LISTS]:
        for truncate in (True, False):
            found, expected = (
                model.to_tokens(input, prepend_bos=prepend_bos, padding_side=side, truncate=truncate)
                for model in (ours, theirs)
            )
            assert found.tolist() == expected.tolist(), input
            if found.numel():  # TransformerLens gives no tokens as floats
                assert found.dtype == expected.dtype


@pytest.mark.parametrize("name", NAMES)
def test_ids_become_the_same_text(name: str) -> None:
    ours, theirs = pair(name)
    ids = ours.to_tokens(TEXTS[3:7])
    row = ids[0]
    for tokens in (ids, row, row[2], ids[:1], row.tolist(), ids.tolist(), row.numpy(), list(row), row[:0]):
        assert ours.to_string(tokens) == theirs.to_string(tokens)


@pytest.mark.parametrize("name", [name for name in NAMES if "gemma" not in name])
@pytest.mark.parametrize("prepend_bos", [None, True, False])
def test_each_token_becomes_the_same_text(name: str, prepend_bos: bool | None) -> None:
    ours, theirs = pair(name)
    for input in [*TEXTS, *LISTS]:
        assert ours.to_str_tokens(input, prepend_bos) == theirs.to_str_tokens(input, prepend_bos)


def test_gemma_text_becomes_tokens_where_the_real_library_cannot() -> None:
    # It gives each id of a Gemma text an axis of its own, and then calls int() on a list.
    ours, theirs = pair("google/gemma-2-2b")
    with pytest.raises(TypeError):
        theirs.to_str_tokens("Hello world!")
    assert ours.to_str_tokens("Hello world!") == theirs.to_str_tokens(theirs.to_tokens("Hello world!"))


@pytest.mark.parametrize("name", NAMES)
def test_ids_given_as_they_are_become_the_same_tokens(name: str) -> None:
    ours, theirs = pair(name)
    row = ours.to_tokens(TEXTS[3])[0]
    as_array = np.array(row.tolist())
    for input in (row, row[None], row[3], row[3:4], as_array, as_array[None], as_array[3:4], [row, as_array], row[:0]):
        assert ours.to_str_tokens(input) == theirs.to_str_tokens(input)
    one = int(row[3])
    assert ours.to_single_str_token(one) == theirs.to_single_str_token(one)
    assert ours.to_single_token(ours.to_single_str_token(one)) == theirs.to_single_token(ours.to_single_str_token(one))


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_found_at_the_same_position(name: str) -> None:
    ours, theirs = pair(name)
    text = "Mary and John and Mary"
    ids = ours.to_tokens(text)
    for token in (" and", int(ids[0, -1]), ids[0, -1]):
        for mode in ("first", "last"):
            for input in (text, ids, ids[0]):
                expected = theirs.get_token_position(token, input, mode)
                assert ours.get_token_position(token, input, mode) == expected
    by_bos = [model.get_token_position(" and", text, prepend_bos=False) for model in (ours, theirs)]
    assert by_bos[0] == by_bos[1]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_have_the_same_residual_directions(name: str) -> None:
    ours, theirs = pair(name)
    ids = ours.to_tokens(["Mary and John", "John and Mary went"])
    for tokens in (" and", 3, ids, ids[0], ids[0, 0], ids[:1, :1]):
        found, expected = ours.tokens_to_residual_directions(tokens), theirs.tokens_to_residual_directions(tokens)
        assert found.shape == expected.shape and found.equal(expected)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("to_tokens", ("a", "yes")),
        ("to_tokens", ("a", None, "middle")),
        ("to_string", (torch.zeros(1, 1, 1, dtype=torch.long),)),
        ("to_str_tokens", (3,)),
        ("to_str_tokens", (torch.zeros(2, 2, dtype=torch.long),)),
        ("to_single_token", ("Mary and John and all",)),
        ("to_single_token", ("",)),
        ("to_single_str_token", ("a",)),
        ("get_token_position", ("Q", "abc")),
        ("get_token_position", (3, torch.zeros(2, 2, dtype=torch.long))),
        ("get_token_position", (0, torch.zeros(2, dtype=torch.long), "middle")),
        ("tokens_to_residual_directions", (1.5,)),
        ("set_tokenizer", ("gpt2",)),
    ],
)
def test_what_is_wrong_raises_the_same_kind_of_error(method: str, arguments: tuple[Any, ...]) -> None:
    ours, theirs = pair("gpt2")
    with pytest.raises((AssertionError, ValueError, TypeError)) as expected:
        getattr(theirs, method)(*arguments)
    with pytest.raises(expected.type):
        getattr(ours, method)(*arguments)
