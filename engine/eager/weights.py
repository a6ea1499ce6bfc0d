"""Canonical-layout weights read from a resolved tree, whatever its linears look like.

The layouts of `engine.seam.Weights`; tensors follow the module's own parameters, so training and edits of the module show.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.eager.resolve import Layer, Norm, Tree
from engine.errors import Refused, UnknownName
from engine.points import Address
from engine.seam import Mode

NORMS = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "q_norm", "k_norm")


class EagerWeights:
    """`weights(name, layer)` in the dtype of the checkpoint; a bias that it lacks is zeros."""

    def __init__(
        self,
        tree: Callable[[], Tree],
        prepare_writing: Callable[[], None],
        refuses: Callable[[Address, Mode], str | None],
    ) -> None:
        """`tree` is asked at each use, since `prepare_writing` may put a copy of the model in its place."""
        self._current_tree = tree
        self._prepare = prepare_writing
        self._refuses = refuses

    @property
    def _tree(self) -> Tree:
        return self._current_tree()

    def has(self, name: str, layer: int | None = None) -> bool:
        try:
            return self._read(name, layer) is not None
        except UnknownName:
            return False

    def __call__(self, name: str, layer: int | None = None) -> Tensor:
        value = self._read(name, layer)
        if value is None:
            raise Refused(f"there is no weight {name}{'' if layer is None else f' in layer {layer}'}: {self._why(name, layer)}")
        return value

    def _why(self, name: str, layer: int | None) -> str:
        point = next((point for beginning, point in _SHOWN_AT.items() if name.startswith(beginning)), "")
        return (self._refuses(Address(point, layer), "read") if point else None) or "the checkpoint has none"

    def prepare_writing(self) -> None:
        """A model that somebody else loaded is copied first; an adapter is refused, since it would be added twice."""
        self._prepare()

    @torch.no_grad()
    def write(self, name: str, layer: int | None, value: Tensor) -> None:
        """Copies `value` into the module's own parameter; readers return views of it wherever the layout allows."""
        self._prepare()
        tree, module_layer = self._tree, None if layer is None else self._tree.layers[layer]
        role = name.rsplit("_", 1)[0]
        norm = getattr(tree, role, None) if layer is None else module_layer.norms.get(role)
        if isinstance(norm, Norm) and name.endswith(("_gain", "_bias")):
            _write_norm(norm, name.endswith("_bias"), value)
            return
        if name == "embed":
            value = value / torch.as_tensor(getattr(tree.embed, "embed_scale", tree.embed_scale)).to(value)
            tree.embed.weight.copy_(value)
            return
        if name.endswith("_bias"):
            _need_bias(tree, module_layer, name, value)
        self(name, layer).copy_(value)

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


def untie(tree: Tree) -> None:
    """Gives the unembedding a weight of its own where it shares the embedding's."""
    if tree.lm_head.weight is tree.embed.weight:
        tree.lm_head.weight = nn.Parameter(tree.embed.weight.detach().clone())


def _write_norm(norm: Norm, of_bias: bool, value: Tensor) -> None:
    if not hasattr(norm.module, "weight"):
        if not of_bias and (value == 1).all() or of_bias and not value.any():
            return
        raise Refused(f"{type(norm.module).__name__} has no weight that could hold this edit")
    if not of_bias:
        norm.module.weight.copy_(value - norm.offset)
    elif getattr(norm.module, "bias", None) is not None:
        norm.module.bias.copy_(value)
    elif value.any():
        raise Refused(f"{type(norm.module).__name__} has no bias that could hold this edit")


def _need_bias(tree: Tree, layer: Layer | None, name: str, value: Tensor) -> None:
    """Gives the linear that owns a bias one of zeros, if it has none and `value` is not zeros."""
    module = _owner(tree, layer, name.removesuffix("_bias"))
    if module.bias is None and value.any():
        module.bias = nn.Parameter(matrix(module).new_zeros(matrix(module).shape[-1]))


def _owner(tree: Tree, layer: Layer | None, name: str) -> nn.Module:
    """The linear that holds a canonical weight."""
    if layer is None:
        return tree.lm_head
    role = {"mlp_in": "up", "mlp_gate": "gate", "mlp_out": "down"}.get(name, name)
    fused = {"q": "qkv", "k": "qkv", "v": "qkv", "up": "gate_up", "gate": "gate_up"}
    return layer.parts[role] if role in layer.parts else layer.parts[fused[role]]


def _embedding(tree: Tree) -> Tensor:
    weight = getattr(tree.embed, "base_layer", tree.embed).weight
    scale = getattr(tree.embed, "embed_scale", None)  # Gemma multiplies inside its embedding module
    scale = tree.embed_scale if scale is None else scale
    return weight if scale == 1 else weight * torch.as_tensor(scale).to(weight)


def _positions(tree: Tree) -> Tensor | None:
    """Row i is position i; OPT's table has two rows before that."""
    return None if tree.pos_embed is None else tree.pos_embed.weight[getattr(tree.pos_embed, "offset", 0) :]


def _qkv(tree: Tree, layer: Layer, part: str, of_bias: bool) -> Tensor | None:
    """A projection as `[heads, D, dh]`, or its bias `[heads, dh]`."""
    fused = part not in layer.parts
    module = layer.parts.get("qkv" if fused else part)
    if module is None:
        return None
    weight = matrix(module)
    flat = bias(module, weight) if of_bias else weight
    if fused:
        split = layer.layout.split(flat, tree.heads)["qkv".index(part)]
    else:  # a gate may stand behind a query
        split = flat.unflatten(-1, (tree.heads.n if part == "q" else tree.heads.n_kv, -1))[..., : tree.heads.d]
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


def _output(tree: Tree, layer: Layer, of_bias: bool) -> Tensor | None:
    if "o" not in layer.parts:
        return None
    weight = matrix(layer.parts["o"])
    return bias(layer.parts["o"], weight) if of_bias else weight.unflatten(0, (tree.heads.n, -1))


def _norm(tree: Tree, norm: Norm | None, of_bias: bool) -> Tensor | None:
    if norm is None:
        return None
    if not hasattr(norm.module, "weight"):  # OLMo's norms have none
        width = tree.embed.weight.shape[-1]
        return tree.embed.weight.new_zeros(width) if of_bias else tree.embed.weight.new_ones(width)
    return (norm.bias if of_bias else norm.gain).to(norm.module.weight.dtype)


# the beginning of a weight's name -> the point that is absent where the weight is
_SHOWN_AT = {f"{norm}_": f"{norm}_scale" for norm in NORMS} | {
    "embed_norm": "embed_norm_scale",
    "pos_embed": "pos_embed",
    "mlp_gate": "mlp_pre_linear",
    "mlp_": "mlp_pre",
    "q": "q",
    "k": "k",
    "v": "value",
    "o": "z",
}

def _learned_by_activation(layer: Layer, name: str) -> Tensor | None:
    value = getattr(layer.parts.get("act"), name, None)
    return None if value is None else value.view(())


Reader = Callable[[Tree, Layer | None], Tensor | None]

_GLOBAL: dict[str, Reader] = {
    "embed": lambda tree, _: _embedding(tree),
    "pos_embed": lambda tree, _: _positions(tree),
    "embed_norm_gain": lambda tree, _: _norm(tree, tree.embed_norm, False),
    "embed_norm_bias": lambda tree, _: _norm(tree, tree.embed_norm, True),
    "final_norm_gain": lambda tree, _: _norm(tree, tree.final_norm, False),
    "final_norm_bias": lambda tree, _: _norm(tree, tree.final_norm, True),
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
for _alpha in ("alpha_p", "alpha_n"):  # learned by the activation itself: xIELU
    _LAYERED[f"act_{_alpha}"] = lambda tree, layer, alpha=_alpha: _learned_by_activation(layer, alpha)
_LAYERED["sinks"] = lambda tree, layer: getattr(layer.inner, "sinks", None)
for _part in "qkv":
    _LAYERED[_part] = lambda tree, layer, part=_part: _qkv(tree, layer, part, False)
    _LAYERED[f"{_part}_bias"] = lambda tree, layer, part=_part: _qkv(tree, layer, part, True)
for _role in NORMS:
    _LAYERED[f"{_role}_gain"] = lambda tree, layer, role=_role: _norm(tree, layer.norms.get(role), False)
    _LAYERED[f"{_role}_bias"] = lambda tree, layer, role=_role: _norm(tree, layer.norms.get(role), True)
