"""Text to token ids and back: the tokenizer methods of `HookedTransformer`, as a mixin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compat.tlens.errors import TokenOutOfRange, require
from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from compat.tlens.utils import (
    USE_DEFAULT_VALUE,
    LocallyOverridenDefaults,
    get_input_with_manually_prepended_bos,
    get_tokenizer_with_bos,
    get_tokens_with_bos_removed,
)
from engine.errors import BadInput

Side = Literal["left", "right"]

# Families whose tokenizer is used as it comes, without asking it to add a BOS token.
KEEP_TOKENIZER = ("OlmoForCausalLM", "OlmoeForCausalLM", "Olmo2ForCausalLM")


def tokenizer_options(architecture: str) -> dict[str, Any]:
    """How a checkpoint's own tokenizer is loaded."""
    return {} if architecture in KEEP_TOKENIZER else {"add_bos_token": True}


class TokenMethods:
    """What `HookedTransformer` does with its tokenizer. Needs `self.cfg`, `self.tokenizer` and `self.W_U`.

    `prepend_bos` and `padding_side` default to `cfg.default_prepend_bos` and `tokenizer.padding_side`; a value given
    to a method holds for that call only.
    """

    cfg: HookedTransformerConfig
    tokenizer: PreTrainedTokenizerBase | None

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase, default_padding_side: Side | None = None) -> None:
        """Use a tokenizer: the one given, rebuilt so that it adds BOS by itself where it can.

        A missing EOS token becomes `<|endoftext|>`, missing pad and BOS tokens become the EOS token, and a
        `cfg.d_vocab` that is not set becomes the tokenizer's.
        """
        require(isinstance(tokenizer, PreTrainedTokenizerBase), f"{type(tokenizer)} is not a Hugging Face tokenizer")
        require(
            default_padding_side in ("left", "right", None),
            f"padding_side must be 'right', 'left' or None, not {default_padding_side!r}",
        )
        if self.cfg.original_architecture not in KEEP_TOKENIZER:
            tokenizer = get_tokenizer_with_bos(tokenizer)
        self.tokenizer = tokenizer
        tokenizer.padding_side = default_padding_side or tokenizer.padding_side or "right"
        self.cfg.tokenizer_prepends_bos = len(tokenizer.encode("")) > 0

        if tokenizer.eos_token is None:
            tokenizer.eos_token = "<|endoftext|>"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.bos_token is None:
            tokenizer.bos_token = tokenizer.eos_token

        if self.cfg.d_vocab == -1:
            self.cfg.d_vocab = max(tokenizer.vocab.values()) + 1
        if self.cfg.d_vocab_out == -1:
            self.cfg.d_vocab_out = self.cfg.d_vocab

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Tensor:
        """Token ids `[batch, pos]` of a text or a list of texts, padded to one length.

        truncate: cut to `cfg.n_ctx` positions (counted before a BOS that is not wanted is taken off).
        """
        with LocallyOverridenDefaults(self, prepend_bos=prepend_bos, padding_side=padding_side):
            require(self.tokenizer is not None, "Cannot use to_tokens without a tokenizer")
            adds_bos = self.cfg.tokenizer_prepends_bos
            require(adds_bos is not None, "Set the tokenizer for the model by calling set_tokenizer")
            if self.cfg.default_prepend_bos and not adds_bos:
                input = get_input_with_manually_prepended_bos(self.tokenizer.bos_token, input)
            tokens = self.tokenizer(
                input,
                return_tensors="pt",
                padding=True,
                truncation=truncate,
                max_length=self.cfg.n_ctx if truncate else None,
            )["input_ids"].long()  # no tokens at all come as an empty float tensor
            if not self.cfg.default_prepend_bos and adds_bos:
                tokens = get_tokens_with_bos_removed(self.tokenizer, tokens)
            return tokens.to(self.cfg.device) if move_to_device else tokens

    def to_string(self, tokens: Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]]) -> str | list[str]:
        """The text of ids `[pos]` (or of one id), or the texts of ids `[batch, pos]`; special tokens are kept."""
        require(self.tokenizer is not None, "Cannot use to_string without a tokenizer")
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(tokens)
        if tokens.ndim > 2:
            raise BadInput(f"to_string takes ids [pos] or [batch, pos], not shape {tuple(tokens.shape)}")
        decode = self.tokenizer.batch_decode if tokens.ndim == 2 else self.tokenizer.decode
        return decode(tokens, clean_up_tokenization_spaces=False)

    def to_str_tokens(
        self,
        input: str | Tensor | np.ndarray | list,
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
    ) -> list[str] | list[list[str]]:
        """Each token as text. Takes a text, ids `[pos]` or `[1, pos]`, or a list of such (then a list of lists)."""
        if isinstance(input, list):
            return [self.to_str_tokens(item, prepend_bos, padding_side) for item in input]
        require(self.tokenizer is not None, "Cannot use to_str_tokens without a tokenizer")
        if isinstance(input, str):
            ids = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side)[0]
        elif isinstance(input, (Tensor, np.ndarray)):
            ids = input.squeeze()
            require(ids.ndim <= 1, f"to_str_tokens takes ids [pos] or [1, pos], not shape {tuple(input.shape)}")
            ids = ids.reshape(-1)  # one id becomes a list of one
        else:
            raise BadInput(f"to_str_tokens takes a text, ids or a list of them, not {type(input)}")
        return self.tokenizer.batch_decode([[int(id_)] for id_ in ids.tolist()], clean_up_tokenization_spaces=False)

    def to_single_token(self, string: str) -> int:
        """The id of a text that is exactly one token. Raises `BadArgument` (an AssertionError) if it is not."""
        tokens = self.to_tokens(string, prepend_bos=False)
        require(tokens.numel() == 1, f"Input string: {string!r} is not a single token! It is {tokens.tolist()}.")
        return tokens.item()

    def to_single_str_token(self, int_token: int) -> str:
        """The text of one id."""
        require(isinstance(int_token, int), f"to_single_str_token takes an int, not {type(int_token)}")
        return self.to_str_tokens(torch.tensor([int_token]))[0]

    def get_token_position(
        self,
        single_token: str | int | Tensor,
        input: str | Tensor,
        mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = USE_DEFAULT_VALUE,
        padding_side: Side | None = USE_DEFAULT_VALUE,
    ) -> int:
        """Where a token stands in a text or in ids `[pos]` or `[1, pos]`. Raises `BadArgument` if it is not there."""
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side)
        if input.ndim == 2:
            require(input.shape[0] == 1, f"ids of rank two must have shape [1, pos], not {tuple(input.shape)}")
            input = input[0]
        if isinstance(single_token, str):
            single_token = self.to_single_token(single_token)
        elif isinstance(single_token, Tensor):
            single_token = single_token.item()
        positions = (input == single_token).nonzero().flatten()
        require(len(positions) > 0, "The token does not occur in the prompt")
        if mode not in ("first", "last"):
            raise BadInput(f"mode must be 'first' or 'last', not {mode!r}")
        return positions[0 if mode == "first" else -1].item()

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The columns of W_U for a token, `[d_model]`, or for ids of any shape, `[..., d_model]`.

        One id, however it is wrapped, gives `[d_model]`. A text must be one token.
        """
        if isinstance(tokens, Tensor) and tokens.numel() > 1:
            return self.W_U[:, tokens].movedim(0, -1)
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = tokens.item()
        if not isinstance(tokens, int):
            raise BadInput(f"tokens_to_residual_directions takes a text, an int or ids, not {type(tokens)}")
        return self.W_U[:, tokens]


def check_token_ids(tokens: Tensor, d_vocab: int) -> None:
    """Raise `TokenOutOfRange` (an IndexError and a ValueError) for ids that have no row among `d_vocab`.

    Raises `BadInput` for tokens that are not integers.
    """
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise BadInput(f"token ids must be integers, not {tokens.dtype}; to enter with a residual pass start_at_layer")
    if tokens.numel() == 0:
        return
    smallest, largest = torch.stack(torch.aminmax(tokens)).tolist()  # one trip from the device
    if smallest >= 0 and largest < d_vocab:
        return
    extreme = largest if largest >= d_vocab else smallest
    position = (tokens == extreme).nonzero()[0].tolist()
    kind = "largest" if extreme == largest else "smallest"
    raise TokenOutOfRange(
        f"token ids must be from 0 to {d_vocab - 1} (the vocabulary has {d_vocab}); the {kind} here is {extreme}, "
        f"at {_where(position)}"
    )


def _where(index: list[int]) -> str:
    names = {1: ["position"], 2: ["row", "position"]}.get(len(index), [f"axis {axis}" for axis in range(len(index))])
    return ", ".join(f"{name} {value}" for name, value in zip(names, index, strict=True))
