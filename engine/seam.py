"""What a facade may ask of an engine, and what it hands over: one forward, one generation, weights, facts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from engine.points import Address
from engine.taps import Tap


@dataclass(frozen=True)
class Batch:
    """Prompts of one forward.

    tokens: ids `[batch, pos]`. mask: 1 where a position may be attended to, `[batch, past + pos]`, or None for all.
    embeds: token embeddings `[batch, pos, d_model]` that stand in for the tokens'. Position ids follow from the mask, so a
    left-padded prompt counts from its first real token.
    """

    tokens: Tensor | None
    mask: Tensor | None = None
    embeds: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, pos)."""
        return tuple((self.tokens if self.embeds is None else self.embeds).shape[:2])


@dataclass(frozen=True)
class Facts:
    """What a checkpoint is: sizes, and the traits of its family that change a meaning."""

    model_id: str
    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    norm: Literal["layer", "rms"]
    eps: float
    act_fn: str
    gated_mlp: bool
    parallel: bool
    positions: Literal["learned", "rotary", "alibi", "none"]
    rotary_dim: int
    rotary_base: float
    rotary_adjacent_pairs: bool
    attn_scale: float  # scores are q.k / attn_scale
    attn_softcap: float | None
    logit_softcap: float | None
    sliding_windows: tuple[int | None, ...]  # one entry a layer
    qk_norm: bool
    post_norms: bool
    n_experts: int | None
    experts_per_token: int | None
    dtype: torch.dtype
    device: torch.device
    qk_norm_joint: bool = False  # one norm over all heads of a query (or key) together
    embed_norm: bool = False  # a norm stands between the embedding and the stream
    shared_norm: bool = False  # attention and the MLP read the output of one norm
    pre_norms: bool = True  # a norm stands between the stream and each sublayer
    sinks: bool = False  # each head's softmax has one logit more, so that a pattern's rows sum to less than one
    logit_scale: float = 1.0  # what the model multiplies the unembedding's output by


class Weights(Protocol):
    """Canonical-layout weights of the raw checkpoint, read lazily.

    `embed` [V, D], `pos_embed` [n_ctx, D], `unembed` [D, V]; by layer `q` [H, D, dh], `k` and `v` [K, D, dh],
    `o` [H, dh, D], `mlp_in` and `mlp_gate` [D, M], `mlp_out` [M, D]; `<norm>_gain`, `<norm>_bias`; `<name>_bias`.
    A bias that the checkpoint lacks is zeros.
    """

    def __call__(self, name: str, layer: int | None = None) -> Tensor: ...

    def has(self, name: str, layer: int | None = None) -> bool: ...

    def prepare_writing(self) -> None:
        """Makes the weights the engine's own to change. Raises `Refused` where they cannot be (adapters, quantized)."""
        ...

    def write(self, name: str, layer: int | None, value: Tensor) -> None:
        """Replaces a weight in the model; a bias that the checkpoint lacks comes into being."""
        ...


Mode = Literal["read", "write", "grad"]


class Engine(Protocol):
    """Runs forwards with taps. Errors are those of `engine.errors`; whatever a tap raises comes through untouched."""

    facts: Facts
    weights: Weights
    tokenizer: Any

    def run(
        self,
        batch: Batch,
        taps: Iterable[Tap],
        *,
        start: tuple[int, Tensor] | None = None,
        stop: int | None = None,
        cache: Any = None,
        grad: bool = False,
        unembed: bool = True,
    ) -> Tensor | None:
        """One forward. Returns logits `[batch, pos, d_vocab]`; the residual `[batch, pos, d_model]` that enters
        layer `stop`; or None when `unembed` is off. `start` is (layer, the residual that enters it)."""
        ...

    def generate(
        self, batch: Batch, taps: Callable[[int], Iterable[Tap]], sample: Callable[[Tensor], Tensor | None]
    ) -> Iterator[Tensor]:
        """The prompt, then one step a token. `taps(step)` gives each step's taps; `sample` takes the last position's
        logits `[batch, d_vocab]` and returns the next ids `[batch]`, or None to end. Yields the ids of each step."""
        ...

    def new_cache(self) -> Any:
        """An empty key/value cache for `run(cache=...)`."""
        ...

    def refuses(self, address: Address, mode: Mode) -> str | None:
        """None, or the reason why the address cannot be read, written or differentiated here, as a sentence."""
        ...

    def close(self) -> None: ...
