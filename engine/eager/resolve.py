"""Finds a decoder's parts by the table of roles, and says what was looked for where one is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
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
        """`[width]`, or a single 1 where the norm has no weight; read from the module at each use so that training shows."""
        weight = getattr(self.module, "weight", None)
        return torch.ones(1) if weight is None else weight.float() + self.offset

    @property
    def bias(self) -> Tensor:
        """`[width]`, or a single 0 where the norm has no weight."""
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
    attn: nn.Module  # or what stands in its place: a convolution, a state-space or linear-attention mixer
    mlp: nn.Module | None  # None where its linears are the block's own, and where the block has one sublayer only
    norms: dict[str, Norm]
    parts: dict[str, nn.Module]  # q, k, v or qkv; o; gate, up or gate_up; down; act; router
    layout: roles.Layout | None  # of a fused qkv
    parallel: bool  # attention and MLP read the same stream
    attends: bool  # whether `attn` is softmax attention
    inner: nn.Module  # the module inside `attn` that owns its projections, mostly `attn` itself
    adds: float  # what the block multiplies a sublayer's output by before it adds it to the stream
    heads_first: bool = False  # q_norm and k_norm see [b, heads, p, dh], not [b, p, heads, dh] or [b, p, heads * dh]
    gives_tuple: bool = False  # whether the block returns the stream in a tuple; learned at the first forward
    gated_q: bool = False  # the query projection puts out an output gate beside each head's query

    @property
    def projects(self) -> bool:
        """Whether queries, keys and values by head come from projections of what attention receives."""
        return "qkv" in self.parts or {"q", "k", "v"} <= self.parts.keys()

    def module(self, role: str) -> nn.Module | None:
        """The module that plays `role`: a container, where a sublayer starts or ends, a norm or a projection."""
        parts = self.parts
        containers = {
            "block": self.block,
            "attn": self.attn,
            "inner": self.inner,
            "attn_end": parts.get("o", self.attn),
            "mlp": self.mlp,
            "mlp_start": self.mlp or parts.get("gate") or parts.get("up"),
            "mlp_end": parts.get("down", self.mlp),
        }
        if role in containers:
            return containers[role]
        return self.norms[role].module if role in self.norms else parts.get(role)


@dataclass
class Tree:
    """The parts of a whole decoder."""

    model: nn.Module
    trunk: nn.Module
    embed: nn.Module
    embed_norm: Norm | None
    pos_embed: nn.Module | None
    layers: list[Layer]
    final_norm: Norm
    lm_head: nn.Module
    heads: roles.Heads
    embed_scale: float  # what the trunk multiplies the embedding module's output by
    logit_scale: float  # what the model multiplies the unembedding's output by
    edited_in_place: set[str] = field(default_factory=set)  # points whose value the model itself goes on to overwrite
    exchanged: bool = True  # whether attention runs through our function; else the family has code of its own

    def module(self, role: str) -> nn.Module | None:
        """The module that plays a role outside the blocks; `embed_end` is the one whose output enters the stream."""
        if role == "embed_end":
            return self.embed if self.embed_norm is None else self.embed_norm.module
        part = getattr(self, role)
        return part.module if isinstance(part, Norm) else part


def resolve(model: nn.Module, config: Any) -> Tree:
    """The tree of a causal model. Raises `LoadFailed` saying what was looked for and what was found."""
    trunk = _find_trunk(model, config.num_hidden_layers)
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    if embed is None or lm_head is None:
        raise LoadFailed(f"{type(model).__name__} names no input or output embeddings; is it a causal language model?")
    blocks = _child(trunk, roles.TRUNK_ROLES["layers"])
    layers = [_resolve_layer(block, index) for index, block in enumerate(blocks)]
    embed_norm = _child(trunk, roles.TRUNK_ROLES["embed_norm"])
    heads = _find_heads(layers, config)
    _find_gates(layers, heads)
    return Tree(
        model=model,
        trunk=trunk,
        embed=embed,
        embed_norm=None if embed_norm is None else _probe(embed_norm),
        pos_embed=_child(trunk, roles.TRUNK_ROLES["pos_embed"]),
        layers=layers,
        final_norm=_probe(_need(trunk, "final_norm", roles.TRUNK_ROLES), config.hidden_size),
        lm_head=lm_head,
        heads=heads,
        embed_scale=float(getattr(config, "embedding_multiplier", 1.0)),
        logit_scale=float(getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)),
    )


def _find_heads(layers: list[Layer], config: Any) -> roles.Heads:
    """Head counts and width, from the config and from how wide the projections are."""
    n = getattr(config, "num_attention_heads", None) or 1
    d = getattr(config, "head_dim", None) or config.hidden_size // n
    for layer in layers:
        if "k" in layer.parts:
            return roles.Heads(n, _width(layer.parts["k"]) // d, d)
        if "qkv" in layer.parts:
            return roles.Heads(n, (_width(layer.parts["qkv"]) // d - n) // 2, d)
    return roles.Heads(n, getattr(config, "num_key_value_heads", None) or n, d)


def _find_gates(layers: list[Layer], heads: roles.Heads) -> None:
    for layer in layers:
        layer.gated_q = "q" in layer.parts and _width(layer.parts["q"]) == 2 * heads.n * heads.d


def _width(linear: nn.Module) -> int:
    """How many features a linear puts out; GPT-2's Conv1D stores its weight the other way round."""
    linear = getattr(linear, "base_layer", linear)
    return linear.nf if type(linear).__name__ == "Conv1D" else linear.out_features


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
    attn = _child(block, roles.LAYER_ROLES["attn"])
    attends = attn is not None
    attn = attn if attends else _child(block, roles.LAYER_ROLES["mixer"])
    if attn is None:
        raise _missing(block, "attn", roles.LAYER_ROLES["attn"] + roles.LAYER_ROLES["mixer"])
    mlp = _child(block, roles.LAYER_ROLES["mlp"])
    inner = next((child for child in attn.children() if hasattr(child, "q_proj")), attn)  # GPT-Neo wraps its attention
    parts = _mlp_parts(block) if mlp is None else _mlp_parts(mlp, needed=True)
    if attends:
        parts |= _attention_parts(inner)
    norms = _resolve_norms(block)
    shared = norms.get("mlp_norm") is not None and norms["mlp_norm"].module is norms["attn_norm"].module
    norms |= {role: _probe(parts.pop(role)) for role in ("q_norm", "k_norm") if role in parts}
    fused = next((name for name in roles.ATTN_ROLES["qkv"] if hasattr(inner, name)), None)
    return Layer(
        index=index,
        block=block,
        attn=attn,
        mlp=mlp,
        norms=norms,
        parts=parts,
        layout=roles.LAYOUTS_BY_CLASS.get(type(inner).__name__, roles.QKV_LAYOUTS[fused]) if fused and attends else None,
        parallel=shared or bool(getattr(block, "use_parallel_residual", False)) or _norm_names(block) in roles.PARALLEL_NORMS,
        attends=attends,
        inner=inner,
        adds=float(getattr(block, "residual_multiplier", 1.0)),
    )


def _attention_parts(attn: nn.Module) -> dict[str, nn.Module]:
    """Attention's linears and norms. Queries, keys and values may be missing only where a shared latent gives them."""
    found = _children(attn, roles.ATTN_ROLES)
    if "qkv" not in found and not {"q", "k", "v"} <= found.keys() and _child(attn, roles.LATENT) is None:
        raise _missing(attn, "qkv or q, k and v", roles.ATTN_ROLES["qkv"] + ("q_proj", "k_proj", "v_proj"))
    if "o" not in found:
        raise _missing(attn, "o", roles.ATTN_ROLES["o"])
    return found


def _mlp_parts(owner: nn.Module, needed: bool = False) -> dict[str, nn.Module]:
    """An MLP's linears; of a mixture of experts, whose linears are the experts' own, only the router."""
    found = _children(owner, roles.MLP_ROLES)
    if hasattr(owner, "experts"):
        return {"router": found["router"]} if "router" in found else {}
    found.pop("router", None)
    if needed and "down" not in found:
        raise _missing(owner, "down", roles.MLP_ROLES["down"])
    return found if "down" in found else {}


def _norm_names(block: nn.Module) -> set[str]:
    return {name for name, _ in block.named_children() if "norm" in name or name.startswith("ln_")}


def _resolve_norms(block: nn.Module) -> dict[str, Norm]:
    found = _norm_names(block)
    for layout in roles.NORM_LAYOUTS:
        if set(layout.values()) == found:
            probed = {name: _probe(getattr(block, name)) for name in found}
            return {role: probed[name] for role, name in layout.items()}
    raise LoadFailed(
        f"{type(block).__name__} has the norms {sorted(found)}, and no known layout is exactly that; known: "
        + "; ".join(str(sorted(set(layout.values()))) for layout in roles.NORM_LAYOUTS)
    )


@torch.no_grad()
def _probe(module: nn.Module, width: int | None = None) -> Norm:
    """What a norm module computes, learned by calling it: whether it centres, and how its weight becomes a gain."""
    weight = getattr(module, "weight", None)
    if weight is None:
        weight = torch.ones(getattr(module, "normalized_shape", (width,))[-1])
    if weight.is_meta:
        raise LoadFailed(f"{type(module).__name__} has no weight in memory to probe; load the model without offloading")
    signs = torch.ones_like(weight)
    signs.view(-1)[::2] = -1  # mean 0 and mean square 1: both kinds of norm return signs * gain + bias
    plain, shifted, tiny = (module(x[None])[0].float() for x in (signs, signs + 3, signs * 1e-3))
    bias = module(torch.zeros_like(signs)[None])[0].float()
    gain = (plain - bias) * signs.float()
    eps = _eps(module, (plain - bias), (tiny - bias))
    for offset in (0.0, 1.0) if hasattr(module, "weight") else (0.0,):
        if torch.allclose(gain * (1 + eps) ** 0.5, weight.float() + offset, rtol=2e-2, atol=2e-2):
            return Norm(module, "layer" if torch.allclose(shifted, plain, rtol=2e-2, atol=2e-2) else "rms", eps, offset)
    raise LoadFailed(
        f"{type(module).__name__} is neither gain * x / scale + bias nor (1 + weight) * x / scale + bias on this checkpoint"
    )


def _eps(module: nn.Module, plain: Tensor, tiny: Tensor) -> float:
    """What the norm adds to the mean square: its own attribute, or what the output for a tiny input tells."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        if getattr(module, name, None) is not None:
            return float(getattr(module, name))
    kept = float((tiny.norm() / plain.norm()).square())  # (1 + eps) 1e-6 / (1e-6 + eps), with eps far below 1
    return float(f"{1e-6 / kept - 1e-6:.1e}")


def _find_trunk(model: nn.Module, n_layers: int) -> nn.Module:
    """The module that owns the list of blocks: the one whose list is as long as the config says."""
    for module in model.modules():
        blocks = _child(module, roles.TRUNK_ROLES["layers"])
        if isinstance(blocks, nn.ModuleList) and len(blocks) == n_layers:
            return module
    raise _missing(model, f"a list of {n_layers} blocks", roles.TRUNK_ROLES["layers"])


def _child(module: nn.Module | None, names: tuple[str, ...]) -> nn.Module | None:
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
