"""Token ids: rows of one length from texts, beginning-of-sequence tokens, and masks of pads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compat.tlens.errors import require
from compat.tlens.utilities.hf_utils import get_hf_token, keep_single_column
from compat.tlens.utilities.tensors import get_cumsum_along_dim
from engine.errors import UnknownName

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


def tokenize_and_concatenate(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = 10,
    set_format: bool = True,
) -> Dataset | IterableDataset:
    """Texts as one stream of tokens, an EOS between documents, cut to rows: a column "tokens" `[row, max_length]`.

    Each mapped batch of texts is a stream of its own: its last, incomplete row is dropped, unless it is the only one,
    which is padded. With `add_bos_token` every row starts with a BOS. `num_proc` None runs in this process; streaming
    ignores it. A tokenizer without a pad token gets one, "<PAD>", and rows are then padded with EOS.
    """
    dataset = keep_single_column(dataset, column_name)
    pad_id = tokenizer.pad_token_id
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "<PAD>"})
        pad_id = tokenizer.eos_token_id
    row_length = max_length - 1 if add_bos_token else max_length

    def to_rows(examples: dict[str, list[str]]) -> dict[str, np.ndarray]:
        require(tokenizer.eos_token is not None, "the tokenizer has no EOS token to put between documents")
        stream = _join(tokenizer, examples[column_name])
        if stream is None:
            return {"tokens": np.array([], dtype=np.int64)}
        rows = _cut(stream, row_length, pad_id)
        if add_bos_token:
            rows = np.insert(rows, 0, tokenizer.bos_token_id, axis=1)
        return {"tokens": rows}

    workers = {} if streaming else {"num_proc": num_proc}  # an IterableDataset takes no num_proc, not even None
    with _no_length_warning(tokenizer):
        rows = dataset.map(to_rows, batched=True, remove_columns=[column_name], **workers)
    if set_format:
        rows.set_format(type="torch", columns=["tokens"])
    return rows


def _join(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> np.ndarray | None:
    if not texts:
        return None
    # Whole documents, without special tokens: a cut string would cut tokens, and a BOS would land inside a row.
    documents = tokenizer(texts, add_special_tokens=False)["input_ids"]
    stream = [documents[0]]
    for document in documents[1:]:
        stream += [[tokenizer.eos_token_id], document]
    return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in stream])


def _cut(stream: np.ndarray, row_length: int, pad_id: int) -> np.ndarray:
    if len(stream) < row_length:
        stream = np.pad(stream, (0, row_length - len(stream)), constant_values=pad_id)
    return stream[: len(stream) // row_length * row_length].reshape(-1, row_length)


@contextmanager
def _no_length_warning(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """A document may well be longer than the model's context here: it is cut afterwards."""
    warned: dict[str, bool] = getattr(tokenizer, "deprecation_warnings", {})
    before = dict(warned)
    warned["sequence-length-is-longer-than-the-specified-maximum"] = False
    try:
        yield
    finally:
        warned.clear()
        warned.update(before)


def get_tokenizer_with_bos(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer itself if it prepends a BOS or has none, else the same one loaded again with add_bos_token=True.

    It is loaded from where it came from, and keeps its padding side; one that cannot prepend its BOS is returned as
    it is. KeyError for one that was built in memory, with nowhere to load it from.
    """
    if tokenizer.bos_token is None:
        return tokenizer
    settings: dict[str, Any] = dict(tokenizer.init_kwargs)
    prepends = settings.pop("add_bos_token", None)
    if prepends is None:
        prepends = getattr(tokenizer, "add_bos_token", False)
    if "name_or_path" not in settings:
        hint = "This tokenizer was built in memory: save it to a folder and load it from there with add_bos_token=True"
        raise UnknownName("name_or_path", settings, "setting of the tokenizer", hint)
    source = settings.pop("name_or_path")
    if prepends:
        return tokenizer

    from transformers import AutoTokenizer

    try:
        with_bos = AutoTokenizer.from_pretrained(source, add_bos_token=True, token=get_hf_token(), **settings)
    except ValueError:  # a BOS with a ":" in it, which tokenizers' templates cannot express
        return tokenizer
    with_bos.padding_side = tokenizer.padding_side
    return with_bos


def get_input_with_manually_prepended_bos(bos_token: str | None, input: str | list[str]) -> str | list[str]:
    """`bos_token` before the text, or before each text; unchanged for None."""
    if bos_token is None:
        return input
    return bos_token + input if isinstance(input, str) else [bos_token + text for text in input]


def get_tokens_with_bos_removed(
    tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, padding_side: str | None = None
) -> torch.Tensor:
    """Tokens `[batch, pos]` without each row's BOS, `[batch, pos - 1]`; unchanged for a tokenizer that has no BOS.

    With left padding the BOS is looked for: the last leading pad where the two are one token. `padding_side` None is
    the tokenizer's.
    """
    if tokenizer.bos_token_id is None:
        return tokens
    if (padding_side or tokenizer.padding_side) == "right":
        return tokens[..., 1:]
    if tokenizer.bos_token_id == tokenizer.pad_token_id:
        bos_at = _leading(tokens == tokenizer.pad_token_id).sum(-1) - 1
    else:
        bos_at = (tokens == tokenizer.bos_token_id).int().argmax(-1)
    kept = torch.ones_like(tokens, dtype=torch.bool).scatter(-1, bos_at.unsqueeze(-1), False)
    return tokens[kept].view(*tokens.shape[:-1], tokens.shape[-1] - 1)


def get_attention_mask(
    tokenizer: PreTrainedTokenizerBase | None,
    tokens: torch.Tensor,
    prepend_bos: bool,
    padding_side: str | None = None,
) -> torch.Tensor:
    """1 for tokens to attend, 0 for pads on the padding side, `[batch, pos]`; all 1 without a tokenizer.

    Only the run of pads at that end counts as padding. Where BOS and pad are one token and a BOS was prepended, the
    last pad on the left is the BOS, and is attended.
    """
    mask = torch.ones_like(tokens)
    if tokenizer is None:
        return mask
    is_pad = tokens == tokenizer.pad_token_id
    if (padding_side or tokenizer.padding_side) == "right":
        return mask.masked_fill(_leading(is_pad.flip(-1)).flip(-1), 0)
    padding = _leading(is_pad)
    mask = mask.masked_fill(padding, 0)
    if prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
        mask[torch.arange(len(mask)), padding.sum(-1) - 1] = 1
    return mask


def _leading(flags: torch.Tensor) -> torch.Tensor:
    """The run of True at the start of the last axis."""
    return get_cumsum_along_dim(~flags, -1) == 0
