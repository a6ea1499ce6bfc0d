"""Canonical-layout weights read from a resolved tree, whatever its linears look like.

The layouts of `engine.seam.Weights`; tensors follow the module's own parameters, so training and edits of the module show.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.eager.resolve import Layer, Norm, Tree
from engine.errors import Refused, UnknownName

NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")


class EagerWeights:
    """`weights(name, layer)` in the dtype of the checkpoint; a bias that it lacks is zeros."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def has(self, name: str, layer: int | None = None) -> bool:
        try:
            return self._read(name, layer) is not None
        except UnknownName:
            return False

    def __call__(self, name: str, layer: int | None = None) -> Tensor:
        value = self._read(name, layer)
        if value is None:
            raise UnknownName(name, _LAYERED if layer is not None else _GLOBAL, what="weight of this checkpoint")
        return value

    def _read(self, name: str, layer: int | None) -> Tensor | None:
        table = _GLOBAL if layer is None else _LAYERED
        if name not in table:
            raise UnknownName(name, table, what="weight")
        return table[name](self._tree, None if layer is None else self._tree.layers[layer])


def matrix(module: nn.Module) -> Tensor:
    """A linear's weight as `[in, out]`: torch's Linear stores the transpose, GPT-2's Conv1D does not. Adapters are added."""
    base = getattr(module, "base_layer", module)
    weight = base.weight
    if not weight.is_floating_point() or type(weight).__name__ in ("Params4bit", "Int8Params"):
        raise Refused(f"the weight of {type(module).__name__} is quantized; its numbers are not there to read")
    weight = weight if type(base).__name__ == "Conv1D" else weight.T
    for adapter in getattr(module, "active_adapters", ()):
        if base is not module and adapter in getattr(module, "lora_A", {}) and not module.merged:
            delta = module.get_delta_weight(adapter)
            weight = weight + (delta if type(base).__name__ == "Conv1D" else delta.T)
    return weight


def bias(module: nn.Module, like: Tensor) -> Tensor:
    """A linear's bias, or zeros for the output axis of `like` `[in, out]`."""
    stored = getattr(getattr(module, "base_layer", module), "bias", None)
    return stored if stored is not None else like.new_zeros(like.shape[-1])


def _embedding(module: nn.Module) -> Tensor:
    weight = getattr(module, "base_layer", module).weight
    scale = getattr(module, "embed_scale", None)  # Gemma multiplies inside its embedding module
    return weight if scale is None else weight * torch.as_tensor(scale).to(weight)


def _qkv(tree: Tree, layer: Layer, part: str, of_bias: bool) -> Tensor:
    """A projection as `[heads, D, dh]`, or its bias `[heads, dh]`."""
    fused = part not in layer.parts
    module = layer.parts["qkv" if fused else part]
    weight = matrix(module)
    flat = bias(module, weight) if of_bias else weight
    split = layer.layout.split(flat, tree.heads)["qkv".index(part)] if fused else flat.unflatten(-1, (-1, tree.heads.d))
    return split if of_bias else split.transpose(0, 1)


def _mlp(layer: Layer, role: str, of_bias: bool) -> Tensor | None:
    """`[in, out]` of an MLP linear or its bias; the two halves of a fused gate_up are gate and up."""
    module = layer.parts.get(role)
    half = None
    if module is None and role in ("gate", "up") and "gate_up" in layer.parts:
        module, half = layer.parts["gate_up"], ("gate", "up").index(role)
    if module is None:
        return None
    weight = matrix(module)
    value = bias(module, weight) if of_bias else weight
    return value if half is None else value.chunk(2, -1)[half]


def _output(tree: Tree, layer: Layer, of_bias: bool) -> Tensor:
    weight = matrix(layer.parts["o"])
    return bias(layer.parts["o"], weight) if of_bias else weight.unflatten(0, (tree.heads.n, -1))


def _norm(norm: Norm | None, of_bias: bool) -> Tensor | None:
    if norm is None:
        return None
    return (norm.bias if of_bias else norm.gain).to(norm.module.weight.dtype)


Reader = Callable[[Tree, Layer | None], Tensor | None]

_GLOBAL: dict[str, Reader] = {
    "embed": lambda tree, _: _embedding(tree.embed),
    "pos_embed": lambda tree, _: None if tree.pos_embed is None else tree.pos_embed.weight,
    "final_norm_gain": lambda tree, _: _norm(tree.final_norm, False),
    "final_norm_bias": lambda tree, _: _norm(tree.final_norm, True),
    "unembed": lambda tree, _: matrix(tree.lm_head),
    "unembed_bias": lambda tree, _: bias(tree.lm_head, matrix(tree.lm_head)),
}

_LAYERED: dict[str, Reader] = {
    "o": lambda tree, layer: _output(tree, layer, False),
    "o_bias": lambda tree, layer: _output(tree, layer, True),
    "mlp_in": lambda tree, layer: _mlp(layer, "up", False),
    "mlp_in_bias": lambda tree, layer: _mlp(layer, "up", True),
    "mlp_gate": lambda tree, layer: _mlp(layer, "gate", False),
    "mlp_gate_bias": lambda tree, layer: _mlp(layer, "gate", True),
    "mlp_out": lambda tree, layer: _mlp(layer, "down", False),
    "mlp_out_bias": lambda tree, layer: _mlp(layer, "down", True),
}
for _part in "qkv":
    _LAYERED[_part] = lambda tree, layer, part=_part: _qkv(tree, layer, part, False)
    _LAYERED[f"{_part}_bias"] = lambda tree, layer, part=_part: _qkv(tree, layer, part, True)
for _role in NORMS:
    _LAYERED[f"{_role}_gain"] = lambda tree, layer, role=_role: _norm(layer.norms.get(role), False)
    _LAYERED[f"{_role}_bias"] = lambda tree, layer, role=_role: _norm(layer.norms.get(role), True)
