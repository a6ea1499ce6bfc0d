"""Finds a decoder's parts by the table of roles, and says what was looked for where one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.eager import roles
from engine.errors import LoadFailed


@dataclass
class Norm:
    """A norm module and the formula it was seen to compute when it was probed."""

    module: nn.Module
    kind: str  # "layer" centres its input, "rms" does not
    eps: float
    offset: float  # Gemma's gain is 1 + weight

    @property
    def gain(self) -> Tensor:
        """`[width]`, float32, read from the module at each use so that training shows."""
        return self.module.weight.float() + self.offset

    @property
    def bias(self) -> Tensor:
        bias = getattr(self.module, "bias", None)
        return bias.float() if bias is not None else torch.zeros_like(self.gain)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is divided, and the scale that divides it: (x or x - mean, sqrt(mean square + eps) `[..., 1]`)."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x, (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def finish(self, normalized: Tensor, dtype: torch.dtype) -> Tensor:
        """Gain and bias on a normalized value, in the dtype the model runs in."""
        return (normalized * self.gain.to(normalized) + self.bias.to(normalized)).to(dtype)


@dataclass
class Layer:
    """The modules of one block. A role that the family lacks is None."""

    index: int
    block: nn.Module
    attn: nn.Module
    mlp: nn.Module
    norms: dict[str, Norm]
    parts: dict[str, nn.Module]  # q, k, v or qkv; o; gate, up or gate_up; down
    layout: roles.Layout | None  # of a fused qkv
    parallel: bool
    heads_first: bool = False  # q_norm and k_norm see [b, heads, p, dh], not [b, p, heads, dh]

    def module(self, role: str) -> nn.Module | None:
        """The module that plays `role`, whether a container, a norm or a projection."""
        if role in ("block", "attn", "mlp"):
            return getattr(self, role)
        return self.norms[role].module if role in self.norms else self.parts.get(role)


@dataclass
class Tree:
    """The parts of a whole decoder."""

    model: nn.Module
    trunk: nn.Module
    embed: nn.Module
    pos_embed: nn.Module | None
    layers: list[Layer]
    final_norm: Norm
    lm_head: nn.Module
    heads: roles.Heads


def resolve(model: nn.Module, config: Any) -> Tree:
    """The tree of a causal model. Raises `LoadFailed` saying what was looked for and what was found."""
    trunk = _find_trunk(model, config.num_hidden_layers)
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = roles.Heads(
        config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads, d_head
    )
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed is None or lm_head is None:
        raise LoadFailed(f"{type(model).__name__} names no input or output embeddings; is it a causal language model?")
    blocks = _child(trunk, roles.TRUNK_ROLES["layers"])
    return Tree(
        model=model,
        trunk=trunk,
        embed=embed,
        pos_embed=_child(trunk, roles.TRUNK_ROLES["pos_embed"]),
        layers=[_resolve_layer(block, index) for index, block in enumerate(blocks)],
        final_norm=_probe(_need(trunk, "final_norm", roles.TRUNK_ROLES)),
        lm_head=lm_head,
        heads=heads,
    )


@torch.no_grad()
def learn_head_axis(tree: Tree, device: torch.device) -> None:
    """Finds out by one short forward whether the norms of q and k see heads before or after positions."""
    length = next(n for n in (3, 5, 7) if n not in (tree.heads.n, tree.heads.n_kv))
    watched = [layer for layer in tree.layers if "q_norm" in layer.norms]

    def watch(layer: Layer) -> Any:
        def hook(_: nn.Module, args: tuple) -> None:
            layer.heads_first = args[0].dim() == 4 and args[0].shape[2] == length

        return layer.norms["q_norm"].module.register_forward_pre_hook(hook)

    handles = [watch(layer) for layer in watched]
    try:
        if watched:
            tree.model(input_ids=torch.zeros(1, length, dtype=torch.long, device=device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def _resolve_layer(block: nn.Module, index: int) -> Layer:
    attn, mlp = (_need(block, role, roles.LAYER_ROLES) for role in ("attn", "mlp"))
    parts = _children(attn, roles.ATTN_ROLES) | _children(mlp, roles.MLP_ROLES)
    qk_norms = {role: _probe(parts.pop(role)) for role in ("q_norm", "k_norm") if role in parts}
    if "qkv" not in parts and not {"q", "k", "v"} <= parts.keys():
        raise _missing(attn, "qkv or q, k and v", roles.ATTN_ROLES["qkv"] + ("q_proj", "k_proj", "v_proj"))
    for role, owner, table in (("o", attn, roles.ATTN_ROLES), ("down", mlp, roles.MLP_ROLES)):
        if role not in parts:
            raise _missing(owner, role, table[role])
    fused = next((name for name in roles.ATTN_ROLES["qkv"] if hasattr(attn, name)), None)
    return Layer(
        index=index,
        block=block,
        attn=attn,
        mlp=mlp,
        norms=_resolve_norms(block) | qk_norms,
        parts=parts,
        layout=roles.QKV_LAYOUTS[fused] if fused else None,
        parallel=bool(getattr(block, "use_parallel_residual", False)),
    )


def _resolve_norms(block: nn.Module) -> dict[str, Norm]:
    found = {name: child for name, child in block.named_children() if "norm" in name or name.startswith("ln_")}
    for layout in roles.NORM_LAYOUTS:
        if set(layout.values()) == found.keys():
            return {role: _probe(found[name]) for role, name in layout.items()}
    raise LoadFailed(
        f"{type(block).__name__} has the norms {sorted(found)}, and no known layout is exactly that; known: "
        + "; ".join(str(sorted(layout.values())) for layout in roles.NORM_LAYOUTS)
    )


@torch.no_grad()
def _probe(module: nn.Module) -> Norm:
    """What a norm module computes, learned by calling it: whether it centres, and how its weight becomes a gain."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta:
        raise LoadFailed(f"{type(module).__name__} has no weight in memory to probe; load the model without offloading")
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((float(getattr(module, name)) for name in names if hasattr(module, name)), 1e-6)
    signs = torch.ones_like(weight)
    signs[::2] = -1  # mean 0 and mean square 1: both kinds of norm return signs * gain + bias
    plain, shifted = module(signs[None])[0].float(), module((signs + 3)[None])[0].float()
    bias = module(torch.zeros_like(signs)[None])[0].float()
    gain = (plain - bias) * signs.float() * (1 + eps) ** 0.5
    for offset in (0.0, 1.0):
        if torch.allclose(gain, weight.float() + offset, rtol=2e-2, atol=2e-2):
            return Norm(module, "layer" if torch.allclose(shifted, plain, rtol=2e-2, atol=2e-2) else "rms", eps, offset)
    raise LoadFailed(
        f"{type(module).__name__} is neither gain * x / scale + bias nor (1 + weight) * x / scale + bias on this checkpoint"
    )


def _find_trunk(model: nn.Module, n_layers: int) -> nn.Module:
    """The module that owns the list of blocks: the one whose list is as long as the config says."""
    for module in model.modules():
        blocks = _child(module, roles.TRUNK_ROLES["layers"])
        if isinstance(blocks, nn.ModuleList) and len(blocks) == n_layers:
            return module
    raise _missing(model, f"a list of {n_layers} blocks", roles.TRUNK_ROLES["layers"])


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    found = (getattr(module, name, None) for name in names)
    return next((child for child in found if isinstance(child, nn.Module)), None)


def _children(module: nn.Module, table: dict[str, tuple[str, ...]]) -> dict[str, nn.Module]:
    return {role: child for role, names in table.items() if (child := _child(module, names)) is not None}


def _need(module: nn.Module, role: str, table: dict[str, tuple[str, ...]]) -> nn.Module:
    child = _child(module, table[role])
    if child is None:
        raise _missing(module, role, table[role])
    return child


def _missing(module: nn.Module, role: str, names: tuple[str, ...]) -> LoadFailed:
    has = ", ".join(name for name, _ in module.named_children())
    return LoadFailed(
        f"cannot resolve {role} in {type(module).__name__}: looked for {', '.join(names)}; it has {has or 'no children'}"
    )
