"""Small tokenizers of each kind that the tiny models come with, trained on the tests' own text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.text import TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def byte_level_bpe(
    size: int, last: Sequence[str] = (), first: Sequence[str] = ()
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a byte-level BPE with exactly `size` entries, special tokens included."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(last), special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
    )
    return _train(tokenizer, trainer, size, last)


def sentence_piece_bpe(size: int, first: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) in Gemma's manner: specials first, then 256 byte tokens, and spaces written as U+2581."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    specials = [*first, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    return _train(tokenizer, trainer, size)


def _train(
    tokenizer: Any, trainer: Any, size: int, last: Sequence[str] = ()
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    vocab = dict(trained["vocab"])
    for special in last:
        vocab[special] = len(vocab)
    if len(vocab) != size:
        raise ValueError(f"the training text gives {len(vocab)} tokens, not {size}")
    return vocab, [tuple(pair) for pair in trained["merges"]]


def gpt2_tokenizer(size: int) -> PreTrainedTokenizerBase:
    from transformers import GPT2Tokenizer

    vocab, merges = byte_level_bpe(size, ["<|endoftext|>"])
    return GPT2Tokenizer(vocab=vocab, merges=merges)


def neox_tokenizer(size: int) -> PreTrainedTokenizerBase:
    from transformers import GPTNeoXTokenizer

    vocab, merges = byte_level_bpe(size, first=["<|endoftext|>", "<|padding|>"])
    return GPTNeoXTokenizer(vocab=vocab, merges=merges)


def llama_tokenizer(size: int) -> PreTrainedTokenizerBase:
    """Begin-of-text comes from a post-processor, and there is no pad token, as in Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    vocab, merges = byte_level_bpe(size, [bos, eos])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


def qwen_tokenizer(size: int) -> PreTrainedTokenizerBase:
    from transformers import Qwen2Tokenizer

    vocab, merges = byte_level_bpe(size, ["<|endoftext|>"])
    return Qwen2Tokenizer(
        vocab=vocab, merges=merges, bos_token=None, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def gemma_tokenizer(size: int) -> PreTrainedTokenizerBase:
    from transformers import GemmaTokenizer

    vocab, merges = sentence_piece_bpe(size, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])
    return GemmaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
