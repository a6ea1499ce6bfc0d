"""The weights of a whole model, stacked by layer, and what the framework paper reads off them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from compat.tlens.FactoredMatrix import FactoredMatrix
from compat.tlens.utils import composition_scores
from engine.errors import BadInput


def _stacked(name: str, shape: str, *, per_query_head: bool = False) -> property:
    """A property that stacks a weight over layers. It is a fresh copy: edit a layer's own weight, not the stack."""

    def read(model: Any) -> Tensor:
        parameters = model.weights_shown
        layers = [parameters.peek(name, layer) for layer in range(model.cfg.n_layers)]
        if per_query_head:
            layers = [parameters.processed.per_query_head(layer) for layer in layers]
        return torch.stack(layers)

    return property(read, doc=f"`[{shape}]`")


class CircuitMethods:
    """Weight properties of `HookedTransformer`. Needs `cfg`, `blocks`, `embed`, `unembed` and `weights_shown`."""

    W_Q = _stacked("q", "n_layers, n_heads, d_model, d_head")
    W_K = _stacked("k", "n_layers, n_heads, d_model, d_head", per_query_head=True)
    W_V = _stacked("v", "n_layers, n_heads, d_model, d_head", per_query_head=True)
    W_O = _stacked("o", "n_layers, n_heads, d_head, d_model")
    W_in = _stacked("mlp_in", "n_layers, d_model, d_mlp")
    W_out = _stacked("mlp_out", "n_layers, d_mlp, d_model")
    b_Q = _stacked("q_bias", "n_layers, n_heads, d_head")
    b_K = _stacked("k_bias", "n_layers, n_heads, d_head", per_query_head=True)
    b_V = _stacked("v_bias", "n_layers, n_heads, d_head", per_query_head=True)
    b_O = _stacked("o_bias", "n_layers, d_model")
    b_in = _stacked("mlp_in_bias", "n_layers, d_mlp")
    b_out = _stacked("mlp_out_bias", "n_layers, d_model")

    @property
    def W_gate(self) -> Tensor | None:
        """`[n_layers, d_model, d_mlp]`, or None where the MLP is not gated."""
        if not self.cfg.gated_mlp:
            return None
        return torch.stack([self.weights_shown.peek("mlp_gate", layer) for layer in range(self.cfg.n_layers)])

    @property
    def W_E(self) -> Tensor:
        """`[d_vocab, d_model]`"""
        return self.embed.W_E

    @property
    def W_U(self) -> Tensor:
        """`[d_model, d_vocab]`"""
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        """`[d_vocab]`"""
        return self.unembed.b_U

    @property
    def W_pos(self) -> Tensor:
        """`[n_ctx, d_model]`, on models with learned positions."""
        return self.pos_embed.W_pos

    @property
    def W_E_pos(self) -> Tensor:
        """`[d_vocab + n_ctx, d_model]`, what the stream can start from."""
        return torch.cat([self.W_E, self.W_pos])

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T, `[n_layers, n_heads, d_model, d_model]` in factors."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O, `[n_layers, n_heads, d_model, d_model]` in factors."""
        return FactoredMatrix(self.W_V, self.W_O)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """The sum of the output biases of the layers before `layer`, `[d_model]`; with `mlp_input` also of its attention."""
        if mlp_input and layer >= self.cfg.n_layers:
            raise BadInput(f"layer {layer} has no MLP input; the model has {self.cfg.n_layers} layers")
        peek = self.weights_shown.peek
        biases = [peek("o_bias", i) for i in range(layer + mlp_input)]
        biases += [peek("mlp_out_bias", i) for i in range(layer) if include_mlp_biases]
        return sum(biases, torch.zeros(self.cfg.d_model, device=self.cfg.device))

    def all_composition_scores(self, mode: Literal["Q", "K", "V"]) -> Tensor:
        """Composition of every head with every head of a later layer, `[n_layers, n_heads, n_layers, n_heads]`; else 0.

        Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
        """
        readers = {"Q": lambda: self.QK, "K": lambda: self.QK.T, "V": lambda: self.OV}
        if mode not in readers:
            raise BadInput(f"mode must be one of {list(readers)}, not {mode!r}")
        scores = composition_scores(self.OV, readers[mode](), broadcast_dims=True)
        layers = torch.arange(self.cfg.n_layers, device=scores.device)
        later = layers[:, None, None, None] < layers[None, None, :, None]
        return torch.where(later, scores, torch.zeros_like(scores))

    def all_head_labels(self) -> list[str]:
        """`L0H0`, `L0H1`, ... in order."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]
