"""The contenders of a benchmark, each doing the same work its own way on the same checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RESID_POST = "hook_resid_post"


class HuggingFace:
    """transformers alone, with plain forward hooks on its decoder layers."""

    name = "Hugging Face"

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.layers = self.model.model.layers

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens).logits

    def capture(self, tokens: Tensor, layers: range) -> dict[int, Tensor]:
        kept: dict[int, Tensor] = {}
        hooks = [
            self.layers[layer].register_forward_hook(lambda m, a, out, layer=layer: kept.__setitem__(layer, _first(out)))
            for layer in layers
        ]
        with _removed(hooks):
            self.model(tokens)
        return kept

    def generate(self, tokens: Tensor, layer: int, vector: Tensor, new: int) -> Tensor:
        hook = self.layers[layer].register_forward_hook(lambda m, a, out: _with_first(out, _first(out) + vector))
        with _removed([hook]):
            return self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )

    def attribute(self, tokens: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(module: Any, args: Any, out: Any) -> None:
            _first(out).retain_grad()
            kept.append(_first(out))

        with _removed([layer.register_forward_hook(keep) for layer in self.layers]):
            self.model(tokens).logits[0, -1, 0].backward()
        self.model.zero_grad()
        return [value.grad for value in kept]


class HookedTransformerContender:
    """A program written for HookedTransformer, on whichever library answers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens)

    def forward_with_idle_hooks(self, tokens: Tensor) -> Any:
        return self.model(tokens)

    def cache_all(self, tokens: Tensor) -> Any:
        return self.model.run_with_cache(tokens)[1]

    def capture(self, tokens: Tensor, layers: range) -> Any:
        names = {f"blocks.{layer}.{RESID_POST}" for layer in layers}
        return self.model.run_with_cache(tokens, names_filter=lambda name: name in names)[1]

    def generate(self, tokens: Tensor, layer: int, vector: Tensor, new: int) -> Tensor:
        steer = (f"blocks.{layer}.{RESID_POST}", lambda value, hook: value + vector)
        with self.model.hooks(fwd_hooks=[steer]):
            return self.model.generate(tokens, max_new_tokens=new, do_sample=False, stop_at_eos=False, verbose=False)

    def attribute(self, tokens: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        names = lambda name: name.endswith(RESID_POST)  # noqa: E731
        with self.model.hooks(bwd_hooks=[(names, lambda grad, hook: kept.append(grad))]):
            self.model(tokens)[0, -1, 0].backward()
        self.model.zero_grad()
        return kept


class TransformerLens(HookedTransformerContender):
    name = "transformer-lens 3.9"

    def __init__(self, path: str) -> None:
        from transformer_lens import HookedTransformer, loading

        from demo.real_models import SMOLLM2

        if SMOLLM2 not in loading.OFFICIAL_MODEL_NAMES:  # its list of names lacks this model; its conversion does not
            loading.OFFICIAL_MODEL_NAMES.append(SMOLLM2)
        super().__init__(HookedTransformer.from_pretrained(SMOLLM2, device="cpu"))


class InterpCompat(HookedTransformerContender):
    name = "interp-compat"

    def __init__(self, path: str) -> None:
        from compat.tlens import HookedTransformer

        super().__init__(HookedTransformer.from_pretrained(path, device="cpu"))


CONTENDERS: dict[str, Callable[[str], Any]] = {
    "hf": HuggingFace,
    "compat": InterpCompat,
    "tlens": TransformerLens,
}


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _with_first(out: Any, value: Tensor) -> Any:
    return (value, *out[1:]) if isinstance(out, tuple) else value


@contextlib.contextmanager
def _removed(hooks: list[Any]) -> Any:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
