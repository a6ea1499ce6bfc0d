"""A decoder as a textbook writes it, over the parameters of a Hugging Face model: the referee for every point's value.

It shares nothing with the engine but the names of the points. That its logits and hidden states are Hugging Face's own
is the first thing tested (test_textbook.py); then what the engine shows, edits or differentiates is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from engine.points import Address

Edits = dict[Address, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Names:
    """Where a family keeps its modules; None for what it lacks."""

    trunk: str = "model"
    embed: str = "embed_tokens"
    pos_embed: str | None = None
    layers: str = "layers"
    final_norm: str = "norm"
    attn_norm: str = "input_layernorm"
    attn_post_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    qkv_by_head: bool = False
    o: str = "self_attn.o_proj"
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    gain_offset: float = 0.0


_GEMMA = dict(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    gain_offset=1.0,
)
_QK_NORM = dict(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
NAMES = {
    "gpt2": Names(
        "transformer", "wte", "wpe", "h", "ln_f", "ln_1", None, "ln_2",
        qkv="attn.c_attn", o="attn.c_proj", gate=None, up="mlp.c_fc", down="mlp.c_proj",
    ),
    "gpt_neox": Names(
        "gpt_neox", "embed_in", None, "layers", "final_layer_norm",
        qkv="attention.query_key_value", qkv_by_head=True, o="attention.dense",
        gate=None, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
    ),
    "llama": Names(),
    "qwen3": Names(**_QK_NORM),
    "gemma2": Names(**_GEMMA),
    "gemma3_text": Names(**_GEMMA, **_QK_NORM),
    "phi3": Names(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
}  # fmt: skip


class Textbook:
    """`Textbook(model)(tokens, mask, edits)` gives every point's value; an edit's result goes on in its place."""

    def __init__(self, model: nn.Module) -> None:
        config = self.config = model.config
        self.model, self.names = model, NAMES[config.model_type]
        self.trunk = getattr(model, self.names.trunk)
        self.n, self.d = config.num_attention_heads, getattr(config, "head_dim", None)
        self.d = self.d or config.hidden_size // self.n
        self.n_kv = getattr(config, "num_key_value_heads", None) or self.n
        self.eps = getattr(config, "layer_norm_epsilon", None) or getattr(config, "layer_norm_eps", None)
        self.eps = self.eps or config.rms_norm_eps
        self.scaling = (getattr(config, "query_pre_attn_scalar", None) or self.d) ** -0.5
        kinds = ("hidden_activation", "hidden_act", "activation_function")
        self.act = ACT2FN[next(getattr(config, kind) for kind in kinds if getattr(config, kind, None))]
        self.parallel = getattr(config, "use_parallel_residual", False)

    def __call__(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        edits: Edits | None = None,
        *,
        start: tuple[int, Tensor] | None = None,
    ) -> dict[Address, Tensor]:
        self.seen: dict[Address, Tensor] = {}
        self.edits = edits or {}
        self.layer: int | None = None
        self.mask = torch.ones_like(tokens) if mask is None else mask
        self.position = (self.mask.cumsum(-1) - 1).clamp(min=0)
        if start is None:
            x = self.at("embeddings", self._embed(self.at("tokens", tokens)))
            if self.names.pos_embed:
                x = x + self.at("pos_embed", getattr(self.trunk, self.names.pos_embed).weight[self.position])
        first, x = (0, x) if start is None else start
        for layer in range(first, self.config.num_hidden_layers):
            self.layer, self.block = layer, getattr(self.trunk, self.names.layers)[layer]
            x = self._block(x)
        self.layer = None
        x = self.at("final_norm", self._norm("final_norm", getattr(self.trunk, self.names.final_norm), x))
        x = self.at("lm_head", x @ self.model.get_output_embeddings().weight.T)
        self.at("logits", _capped(x, getattr(self.config, "final_logit_softcapping", None)))
        return self.seen

    def at(self, point: str, x: Tensor) -> Tensor:
        address = Address(point, self.layer)
        x = self.edits[address](x) if address in self.edits else x * 1  # a tensor of its own, also for its gradient
        self.seen[address] = x
        return x

    def _edited(self, point: str) -> bool:
        return Address(point, self.layer) in self.edits

    def _embed(self, tokens: Tensor) -> Tensor:
        scale = self.config.hidden_size**0.5 if "gemma" in self.config.model_type else 1.0
        return getattr(self.trunk, self.names.embed).weight[tokens] * scale

    def _block(self, x: Tensor) -> Tensor:
        x = self.at("resid_pre", x)
        out = self.at("attn_out", self._attention(x))
        out = self.at("attn_out_post", self._post_norm("attn_post_norm", out))
        mid = x + out if self.parallel else self.at("resid_mid", x + out)
        y = self.at("mlp_stream_in", x if self.parallel else mid)
        y = self.at("mlp_in", self._norm("mlp_norm", self._module("mlp_norm"), y))
        y = self.at("mlp_out", self._mlp(y))
        return self.at("resid_post", mid + self.at("mlp_out_post", self._post_norm("mlp_post_norm", y)))

    def _attention(self, stream: Tensor) -> Tensor:
        names, norm = self.names, self._module("attn_norm")
        plain = self.at("attn_in", self._norm("attn_norm", norm, stream, quiet=True))
        edited_in = plain if self._edited("attn_in") else None
        by_part = {}
        shared = self._by_head("attn_stream_in", stream, self.n) if self.n == self.n_kv else stream
        for part, n in (("q", self.n), ("k", self.n_kv), ("v", self.n_kv)):
            x = self._by_head(f"{part}_input", stream if shared.dim() == 3 else shared, n)
            x = self._norm("attn_norm", norm, x)
            by_part[part] = self._project(part, x if edited_in is None else edited_in)
        q, k, v = self.at("q", by_part["q"]), self.at("k", by_part["k"]), self.at("value", by_part["v"])
        if names.q_norm:
            q, k = (self._qk_norm(role, x) for role, x in (("q_norm", q), ("k_norm", k)))
        q_rot, k_rot = self.at("q_rot", self._rotated(q)), self.at("k_rot", self._rotated(k))
        per_query_head = [x.repeat_interleave(self.n // self.n_kv, dim=2) for x in (k_rot, v)]
        scores = torch.einsum("bqhd,bkhd->bhqk", q_rot, per_query_head[0]) * self.scaling
        scores = _capped(scores, getattr(self.config, "attn_logit_softcapping", None))
        scores = self.at("attn_scores", scores.masked_fill(~self._allowed()[:, None], -torch.inf))
        pattern = self.at("attn_probs", torch.softmax(scores, -1).nan_to_num())
        z = self.at("z", torch.einsum("bhqk,bkhd->bqhd", pattern, per_query_head[1]))
        o = self._submodule(names.o)
        result = self.at("attn_result", torch.einsum("bphd,hdm->bphm", z, _matrix(o).unflatten(0, (self.n, self.d))))
        return result.sum(2) + _bias(o)

    def _by_head(self, point: str, x: Tensor, n: int) -> Tensor:
        """The stream that a branch reads: with a copy a head only where that copy was edited."""
        copies = x if x.dim() == 4 else x[:, :, None].expand(-1, -1, n, -1)
        edited = self.at(point, copies)
        return edited if self._edited(point) else x

    def _project(self, part: str, x: Tensor) -> Tensor:
        """`[b, p, D]`, or one row a head `[b, p, n, D]`, to `[b, p, n, dh]`."""
        if self.names.qkv is None:
            module = self._submodule(getattr(self.names, part))
            weight, bias = (t.unflatten(-1, (-1, self.d)) for t in (_matrix(module), _bias(module)))
        else:
            weight, bias = (self._of_fused(t, part) for t in self._fused())
        return torch.einsum("bphm,mhd->bphd" if x.dim() == 4 else "bpm,mhd->bphd", x, weight) + bias

    def _fused(self) -> tuple[Tensor, Tensor]:
        module = self._submodule(self.names.qkv)
        return _matrix(module), _bias(module)

    def _of_fused(self, fused: Tensor, part: str) -> Tensor:
        index = "qkv".index(part)
        if self.names.qkv_by_head:
            return fused.unflatten(-1, (self.n, 3, self.d))[..., index, :]
        first = (0, self.n, self.n + self.n_kv)[index]
        return fused.unflatten(-1, (-1, self.d))[..., first : first + (self.n_kv if index else self.n), :]

    def _qk_norm(self, role: str, x: Tensor) -> Tensor:
        x = self.at(f"{role}_in", x)
        return self.at(f"{role}_out", self._norm(role, self._module(role), x))

    def _rotated(self, x: Tensor) -> Tensor:
        if not hasattr(self.trunk, "rotary_emb"):
            return x
        kinds = (self.config.layer_types[self.layer],) if self.config.model_type == "gemma3_text" else ()
        cos, sin = (t[:, :, None].to(x.dtype) for t in self.trunk.rotary_emb(x, self.position, *kinds))
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    def _allowed(self) -> Tensor:
        """`[b, q, k]`: earlier positions that are no padding, within the layer's window."""
        n = self.mask.shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        kinds = getattr(self.config, "layer_types", None)
        local = kinds is not None and kinds[self.layer] == "sliding_attention"
        allowed = (distance >= 0) & (distance < (self.config.sliding_window if local else n))
        return allowed & (self.mask[:, None] > 0)

    def _mlp(self, x: Tensor) -> Tensor:
        names = self.names
        if names.gate_up:
            gate, up = _linear(self._submodule(names.gate_up), x).chunk(2, -1)
        else:
            up = _linear(self._submodule(names.up), x)
            gate = _linear(self._submodule(names.gate), x) if names.gate else None
        if gate is None:
            act = self.act(self.at("mlp_pre", up))
        else:
            act = self.act(self.at("mlp_pre", gate)) * self.at("mlp_pre_linear", up)
        return _linear(self._submodule(names.down), self.at("mlp_act", act))

    def _post_norm(self, role: str, x: Tensor) -> Tensor:
        return self._norm(role, self._module(role), x) if getattr(self.names, role) else x

    def _norm(self, role: str, module: nn.Module, x: Tensor, quiet: bool = False) -> Tensor:
        at = (lambda _, value: value) if quiet else self.at
        if isinstance(module, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        scale = at(f"{role}_scale", (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = at(f"{role}_normalized", x / scale)
        bias = getattr(module, "bias", None)
        return normalized * (module.weight + self.names.gain_offset) + (0 if bias is None else bias)

    def _module(self, role: str) -> nn.Module:
        return self._submodule(getattr(self.names, role))

    def _submodule(self, path: str) -> nn.Module:
        return self.block.get_submodule(path)


def _matrix(module: nn.Module) -> Tensor:
    return module.weight if type(module).__name__ == "Conv1D" else module.weight.T


def _bias(module: nn.Module) -> Any:
    return torch.zeros(_matrix(module).shape[-1]).to(module.weight) if module.bias is None else module.bias


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    return x @ _matrix(module) + _bias(module)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
