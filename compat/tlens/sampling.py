"""What `generate` does beside the forward: read the prompt, choose the next ids, know when to stop, shape the answer.

    prompt = read_prompt(model, input, return_type, prepend_bos, padding_side)
    sampling = Sampling(prompt, model.tokenizer, max_new_tokens, temperature=0.7)
    while not sampling.done:
        ids = sampling.next(logits)     # [batch, d_vocab], of the last position, to [batch]
    return sampling.result(model.tokenizer, model.embed)

A seeded run draws random numbers as TransformerLens does: one draw a step over the whole batch, finished rows included.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compat.tlens.errors import require
from compat.tlens.utils import USE_DEFAULT_VALUE, get_attention_mask, sample_logits

RETURN_TYPES = ("input", "str", "tokens", "embeds")


@dataclass(frozen=True)
class Prompt:
    """What `generate` was given. tokens `[batch, pos]`, or embeds `[batch, pos, d_model]` when it was given those.

    mask: `[batch, pos]`, 1 where a position counts, 0 on padding; None when there are no tokens or no tokenizer.
    return_type: "str", "tokens" or "embeds".
    """

    tokens: Tensor | None
    embeds: Tensor | None
    mask: Tensor | None
    return_type: str

    @property
    def device(self) -> torch.device:
        return (self.tokens if self.tokens is not None else self.embeds).device

    @property
    def batch_size(self) -> int:
        return len(self.tokens if self.tokens is not None else self.embeds)


def read_prompt(
    model: Any,
    input: str | list[str] | Tensor,
    return_type: str = "input",
    prepend_bos: bool | None = USE_DEFAULT_VALUE,
    padding_side: Literal["left", "right"] | None = USE_DEFAULT_VALUE,
) -> Prompt:
    """The prompt of `model.generate`, on the model's device. Several texts are always padded on the left.

    Call it where the model's defaults are already overridden by `prepend_bos` and `padding_side`.
    """
    texts = isinstance(input, str) or (isinstance(input, list) and all(isinstance(text, str) for text in input))
    require(texts or isinstance(input, Tensor), "Input must be either string, torch.Tensor, or List[str]")
    require(return_type in RETURN_TYPES, f"return_type must be one of {list(RETURN_TYPES)}, not {return_type!r}")
    tokenizer = model.tokenizer
    several = isinstance(input, list) and len(input) > 1
    if texts:
        require(tokenizer is not None, "Must provide a tokenizer if passing a string to the model")
        tokens = model.to_tokens(input, prepend_bos=prepend_bos, padding_side="left" if several else padding_side)
    else:
        input = input.to(model.cfg.device)
        if input.ndim == 3:
            return Prompt(None, input, None, "embeds" if return_type == "input" else return_type)
        require(input.ndim == 2, f"generate takes ids [batch, pos] or embeddings, not shape {tuple(input.shape)}")
        tokens = input
    mask = None
    if tokenizer is not None:
        side = "left" if several else tokenizer.padding_side
        mask = get_attention_mask(tokenizer, tokens, model.cfg.default_prepend_bos, padding_side=side)
        mask[mask.sum(-1) == 0] = 1  # not padding, but a prompt of BOS alone where the two are one token
    if return_type == "input":
        return_type = "str" if texts else "tokens"
    return Prompt(tokens, None, mask, return_type)


def accept_generation_kwargs(generation_kwargs: dict[str, Any]) -> bool:
    """Whether the logits of each step are wanted (`output_logits`); warns of every keyword that has no effect."""
    ignored = sorted(generation_kwargs.keys() - {"output_logits", "return_dict_in_generate"})
    if ignored:
        warnings.warn(f"generate knows no {', '.join(ignored)}; ignored", UserWarning, stacklevel=3)
    return bool(generation_kwargs.get("output_logits", False))


class Sampling:
    """The choices of one generation.

    A row that has produced a stop token is finished: from then on it gets the EOS id, whatever is drawn for it.
    `done` once every row is finished (with stop_at_eos) or max_new_tokens are chosen.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Any,
        max_new_tokens: int = 10,
        *,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        output_logits: bool = False,
    ) -> None:
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.do_sample = do_sample
        self.how = dict(top_k=top_k, top_p=top_p, temperature=temperature)
        # TransformerLens counts tokens only where the prompt has some.
        self.freq_penalty = freq_penalty if prompt.tokens is not None else 0.0
        self.stop_ids, self.eos_id = _stop_ids(tokenizer, eos_token_id) if stop_at_eos else ([], 0)
        self.finished = torch.zeros(prompt.batch_size, dtype=torch.bool, device=prompt.device)
        self.logits: list[Tensor] | None = [] if output_logits else None
        self.chosen: list[Tensor] = []  # ids [batch], one entry a step

    @property
    def done(self) -> bool:
        """Whether no further step is needed."""
        return len(self.chosen) >= self.max_new_tokens or bool(self.stop_ids and self.finished.all())

    @property
    def new_tokens(self) -> Tensor:
        """The ids chosen so far, `[batch, steps]`."""
        if self.chosen:
            return torch.stack(self.chosen, dim=1)
        return torch.zeros((self.prompt.batch_size, 0), dtype=torch.long, device=self.prompt.device)

    @property
    def tokens(self) -> Tensor:
        """Prompt and chosen ids, `[batch, pos + steps]`; only the chosen ones after a prompt of embeddings."""
        if self.prompt.tokens is None:
            return self.new_tokens
        return torch.cat([self.prompt.tokens, self.new_tokens], dim=1)

    @property
    def mask(self) -> Tensor | None:
        """The prompt's mask with a 1 for every chosen id, `[batch, pos + steps]`."""
        if self.prompt.mask is None:
            return None
        return torch.nn.functional.pad(self.prompt.mask, (0, len(self.chosen)), value=1)

    def next(self, logits: Tensor) -> Tensor:
        """The next ids `[batch]` from the last position's logits `[batch, d_vocab]`."""
        if self.logits is not None:
            self.logits.append(logits.clone())
        ids = (self._draw(logits) if self.do_sample else logits.argmax(-1)).to(self.prompt.device)
        if self.stop_ids:
            ids = ids.masked_fill(self.finished, self.eos_id)
            self.finished |= torch.isin(ids, torch.tensor(self.stop_ids, device=ids.device))
        self.chosen.append(ids)
        return ids

    def _draw(self, logits: Tensor) -> Tensor:
        counted = self.tokens if self.freq_penalty > 0 else None
        return sample_logits(logits, **self.how, freq_penalty=self.freq_penalty, tokens=counted)

    def result(self, tokenizer: Any, embed: Callable[[Tensor], Tensor]) -> Any:
        """What `generate` returns: text, a list of texts, ids or embeddings, by the prompt's return type.

        With output_logits, Hugging Face's output instead: `sequences`, and `logits`, one `[batch, d_vocab]` a step.
        embed: ids `[batch, pos]` to embeddings `[batch, pos, d_model]` without positions, as `model.embed`.
        """
        if self.logits is not None:
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=self.tokens, logits=tuple(self.logits))
        if self.prompt.return_type == "tokens":
            return self.tokens
        if self.prompt.return_type == "embeds":
            before = embed(self.prompt.tokens) if self.prompt.embeds is None else self.prompt.embeds
            return torch.hstack([before, embed(self.new_tokens)])
        require(tokenizer is not None, "Must provide a tokenizer to return text")
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in self.tokens]
        return texts[0] if len(texts) == 1 else texts


def _stop_ids(tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> tuple[list[int], int]:
    """The ids that finish a row, and the one that a finished row is filled with."""
    own = getattr(tokenizer, "eos_token_id", None)
    if eos_token_id is None:
        require(own is not None, "Must pass an eos_token_id if stop_at_eos is True and the tokenizer has none")
        eos_token_id = own
    if isinstance(eos_token_id, int):
        return [eos_token_id], eos_token_id
    return list(eos_token_id), eos_token_id[0] if own is None else own


class Stream:
    """Collects chosen ids into the pieces that `generate_stream` yields, of at least `max_tokens_per_yield` positions.

    The first piece begins with the prompt `[batch, pos]`, which counts; the last piece may be shorter.
    """

    def __init__(self, tokens: Tensor, max_tokens_per_yield: int) -> None:
        self.waiting = [tokens]
        self.least = max_tokens_per_yield

    def push(self, ids: Tensor) -> Tensor | None:
        """Add ids `[batch]`; a piece `[batch, pos]` when enough have come together."""
        self.waiting.append(ids[:, None])
        return self.rest() if sum(piece.shape[1] for piece in self.waiting) >= self.least else None

    def rest(self) -> Tensor | None:
        """What has not been handed out, or None."""
        waiting, self.waiting = self.waiting, []
        return torch.cat(waiting, dim=1) if waiting else None
