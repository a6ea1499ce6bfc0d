"""Tiny random models in a local hub cache, under official names.

`transformer_lens.HookedTransformer.from_pretrained("gpt2")` and `AutoModelForCausalLM.from_pretrained("gpt2")` load
them offline once HF_HOME is `hub_home()`. Every parameter is random (norm gains not 1, biases not 0), no two sizes coincide
that a wrong axis could confuse, and a sliding window is shorter than a test prompt. A family costs one row of FAMILIES.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import real_models
from demo.hub_cache import cache_root, entry, home_for, make_entry, publish, snapshot
from tests.text import TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes too
SEED = 1


@dataclass(frozen=True)
class Family:
    """One tiny model: the name it is found under, its configuration, and its tokenizer."""

    name: str
    config_class: str
    config: dict[str, Any]
    tokenizer: Callable[[int], PreTrainedTokenizerBase]
    tokenizer_size: int
    gain: float = 1.0  # what a norm weight varies around: 0 where the family adds 1 to it
    extra_config: dict[str, Any] = field(default_factory=dict)  # written to config.json as it is


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


FAMILIES = (
    Family(
        "gpt2",
        "GPT2Config",
        # TL reads n_ctx and assumes n_inner = 4 n_embd
        dict(n_layer=3, n_head=4, n_embd=4 * HEAD_DIM, n_positions=72, vocab_size=403),
        gpt2_tokenizer,
        403,
        extra_config=dict(n_ctx=72),
    ),
    Family(
        "EleutherAI/pythia-70m",
        "GPTNeoXConfig",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            hidden_size=4 * HEAD_DIM,
            intermediate_size=320,
            max_position_embeddings=88,
            vocab_size=420,  # padded beyond the tokenizer, as Pythia's is
            hidden_act="gelu",
            rotary_pct=0.25,
            use_parallel_residual=True,
            tie_word_embeddings=False,
        ),
        neox_tokenizer,
        404,
    ),
    Family(
        "meta-llama/Llama-3.2-1B",
        "LlamaConfig",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=96,
            intermediate_size=224,
            max_position_embeddings=112,
            vocab_size=411,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=28,
            ),
        ),
        llama_tokenizer,
        411,
    ),
    Family(
        "Qwen/Qwen3-0.6B",
        "Qwen3Config",
        dict(
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=112,
            intermediate_size=240,
            max_position_embeddings=120,
            vocab_size=424,  # padded beyond the tokenizer, as Qwen's is
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
        qwen_tokenizer,
        408,
    ),
    Family(
        "google/gemma-2-2b",
        "Gemma2Config",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=80,
            intermediate_size=208,
            max_position_embeddings=104,
            vocab_size=437,
            sliding_window=6,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,  # low enough to bend these scores and logits
            final_logit_softcapping=5.0,
        ),
        gemma_tokenizer,
        437,
        gain=0.0,
    ),
)

NAMES = tuple(family.name for family in FAMILIES)


def hub_home() -> Path:
    """The HF_HOME whose hub cache holds the tiny models; its name changes with this file and the libraries."""
    recipe = Path(__file__).read_bytes() + TEXT.encode()
    return home_for("tiny-hub", recipe, ["torch", "transformers", "tokenizers"])


def ensure_hub() -> Path:
    """Build the tiny hub unless it is there already; returns `hub_home()`."""
    home = hub_home()
    if not home.is_dir():
        cache_root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_root()) as workplace:
            built = Path(workplace) / "home"
            for family in FAMILIES:
                build(family, make_entry(built / "hub", family.name))
            publish(built, home)
    return home


def local_folder(name: str) -> Path:
    """The tiny model's folder, for code that takes local paths."""
    return snapshot(ensure_hub() / "hub", name)


def ensure_real(name: str) -> Path:
    """Bring a real model (see demo.real_models) into this hub, under its official name; returns its folder."""
    folder = real_models.ensure(name)
    link = entry(ensure_hub() / "hub", name)
    if not link.exists():
        link.unlink(missing_ok=True)  # it led to a folder that has been cleared away
        with suppress(FileExistsError):  # another process was faster
            link.symlink_to(folder.parents[1], target_is_directory=True)
    return folder


def build(family: Family, folder: Path) -> None:
    """Write the family's tiny model and tokenizer to a folder."""
    import torch
    import transformers

    tokenizer = family.tokenizer(family.tokenizer_size)
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = getattr(transformers, family.config_class)(**family.config, **ids, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, SEED, family.gain)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if family.extra_config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.extra_config, indent=2))


def randomise(model: PreTrainedModel, seed: int, gain: float = 1.0) -> None:
    """Give every parameter a value that a mistake would show in.

    Matrices are scaled to keep the size of what they act on (a little more for queries and keys, so that attention is
    far from uniform); norm gains vary around `gain`, biases around 0.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                centre = gain if name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.3 * noise)
            elif _is_table(name):
                parameter.copy_(0.12 * noise)
            else:
                parameter.copy_(1.3 * noise / _width_in(model, name, parameter) ** 0.5)


def _is_table(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed_tokens", "embed_in"))


def _width_in(model: PreTrainedModel, name: str, matrix: Any) -> int:
    """The size of the axis a matrix sums over; GPT-2's Conv1D keeps it first."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return matrix.shape[0 if type(owner).__name__ == "Conv1D" else 1]
