"""The tiny models of the engine's tests: those of the hub, and two more for layouts that the hub lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap
from tests import hub

GEMMA_2 = "google/gemma-2-2b"
_SIZES = dict(num_attention_heads=4, head_dim=hub.HEAD_DIM, hidden_size=96, intermediate_size=176, vocab_size=401)
# name -> (configuration class, its arguments, what a norm weight varies around)
_UNLISTED: dict[str, tuple[str, dict[str, Any], float]] = {
    "gemma-3": (
        "Gemma3TextConfig",
        _SIZES
        | dict(
            num_hidden_layers=4,
            num_key_value_heads=1,
            max_position_embeddings=104,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=24,
        ),
        0.0,
    ),
    "phi-3": (  # q, k and v in one linear, gate and up in another
        "Phi3Config",
        _SIZES
        | dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            hidden_size=4 * hub.HEAD_DIM,
            max_position_embeddings=104,
            original_max_position_embeddings=104,
            pad_token_id=0,
        ),
        1.0,
    ),
    "llama with biases": (  # q, k and v apart, and as many key heads as query heads
        "LlamaConfig",
        _SIZES
        | dict(
            num_hidden_layers=3,
            num_key_value_heads=4,
            max_position_embeddings=104,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        1.0,
    ),
}
NAMES = (*hub.NAMES, *_UNLISTED)
# three that have every mechanism between them, for tests whose loops are long
FEW = ("gpt2", "EleutherAI/pythia-70m", "gemma-3")


def hf_model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A new Hugging Face model, in the attention implementation that is its own; `options` go to transformers."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    if name not in _UNLISTED:
        own = {"attn_implementation": "eager"} if name == GEMMA_2 else {}  # sdpa would drop its soft cap
        return auto.from_pretrained(name, dtype=dtype, **own | options).eval()
    config_class, arguments, gain = _UNLISTED[name]
    model = auto.from_config(getattr(transformers, config_class)(**arguments), dtype=torch.float32, **options)
    hub.randomise(model, hub.SEED, gain)
    return model.to(dtype).eval()


def new_engine(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> EagerEngine:
    """An engine of its own, for a test that changes it."""
    return EagerEngine(hf_model(name, dtype, **options), model_id=name)


def prompts(d_vocab: int, n: int = 2, length: int = 11, seed: int = 0) -> Tensor:
    """Token ids `[n, length]`, longer than every sliding window."""
    return torch.randint(0, d_vocab, (n, length), generator=torch.Generator().manual_seed(seed))


def left_padded(d_vocab: int, lengths: tuple[int, ...] = (11, 4, 8)) -> Batch:
    """Prompts of these lengths, padded on the left with an id that is no padding token."""
    tokens = prompts(d_vocab, len(lengths), max(lengths), seed=1)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return Batch(tokens.masked_fill(mask == 0, 5), mask)


def positions(mask: Tensor) -> Tensor:
    """Position ids `[batch, pos]` that count from each row's first real token."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


# one copy of the stream a head: tapping them gives the norm's own points a head axis
BRANCHES = ("attn_stream_in", "q_input", "k_input", "v_input")


def addresses(engine: EagerEngine, leave_out: tuple[str, ...] = ()) -> list[Address]:
    """Every address that the engine serves, in forward order within a layer."""
    every = [
        Address(point.name, layer)
        for point in POINTS.values()
        for layer in (range(engine.facts.n_layers) if point.layered else (None,))
        if point.name not in leave_out
    ]
    return [address for address in every if engine.refuses(address, "read") is None]


def read(
    engine: EagerEngine, batch: Batch, at: list[Address], edits: list[Tap] = (), **options: Any
) -> dict[Address, Tensor]:
    """What reading taps see at these addresses (of several calls the last) once the edits have run."""
    seen: dict[Address, Tensor] = {}
    readers = [Tap(a, lambda x, a=a: seen.__setitem__(a, x.clone()), reads=True) for a in at]
    engine.run(batch, [*edits, *readers], **options)
    return seen


@torch.no_grad()
def worst(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest finite magnitude expected; infinite where the shapes differ."""
    if got.shape != expected.shape:
        return float("inf")
    infinite = expected.isinf()
    if infinite.any():  # masked scores
        if not torch.equal(got.isinf(), infinite):
            return float("inf")
        got, expected = got[~infinite], expected[~infinite]
    error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if expected.numel() else 0.0
    return float("inf") if error != error else error


def hooks_on(model: torch.nn.Module) -> int:
    """How many hooks and patched forwards there are on a model's modules."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + ("forward" in vars(m))
        for m in model.modules()
    )
