"""The tree that a program walks: `model.blocks[3].attn.hook_z`, `model.unembed.W_U`, and so on.

Modules hold hook points and show weights; the engine does the work of a forward. Called on their own, the small ones
compute with the processed weights, and a block or its attention asks the engine to run that one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from compat.tlens.FactoredMatrix import FactoredMatrix
from compat.tlens.hook_points import HookPoint
from compat.tlens.parameters import ModelParameters, NoParametersApart, Weight, WeightModule
from compat.tlens.utils import get_offset_position_ids
from engine.errors import Refused
from engine.points import Address
from engine.seam import Facts
from mappers import tlens as mapper

NO_CACHE = "call the model without past_kv_cache, or generate with use_past_kv_cache=False"


class Embed(WeightModule):
    """Token embedding: ids `[batch, pos]` -> `[batch, pos, d_model]`."""

    W_E = Weight("embed")

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any) -> None:
        super().__init__(parameters_of_model, cfg)
        if cfg.post_embedding_ln:
            self.ln = NORMS[unfolded(cfg)](parameters_of_model, cfg, "embed_norm", None)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.parameters_of_model.peek("embed")[tokens]
        return self.ln(embedded) if self.cfg.post_embedding_ln else embedded


class PosEmbed(WeightModule):
    """Learned position embedding, `[batch, pos, d_model]`; padding gets zeros."""

    W_pos = Weight("pos_embed")

    def forward(self, tokens: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        table, n = self.parameters_of_model.peek("pos_embed"), tokens.shape[-1]
        if attention_mask is None:
            return table[past_kv_pos_offset : past_kv_pos_offset + n].expand(tokens.shape[0], -1, -1).clone()
        positions = get_offset_position_ids(past_kv_pos_offset, attention_mask)
        kept = attention_mask[:, past_kv_pos_offset : past_kv_pos_offset + n, None].bool()
        return table[positions] * kept


class Norm(WeightModule):
    """A LayerNorm or RMSNorm over the last axis, with hooks on its scale and on the normalized value."""

    centres = False
    norm_name = ""

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, norm_name: str, layer_index: int | None) -> None:
        super().__init__(parameters_of_model, cfg, layer_index)
        self.norm_name = norm_name
        self.hook_scale = HookPoint()  # [batch, pos, 1]
        self.hook_normalized = HookPoint()  # [batch, pos, width]

    @property
    def eps(self) -> float:
        return self.cfg.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float() if self.cfg.dtype not in (torch.float32, torch.float64) else x
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.finish(self.hook_normalized(x / scale).to(self.cfg.dtype))

    def finish(self, normalized: Tensor) -> Tensor:
        return normalized


class _WithGain(Norm):
    """A norm whose gain was not folded into the weights that read from it."""

    def weights(self) -> dict[str, str]:
        return {"w": f"{self.norm_name}_gain"} | ({"b": f"{self.norm_name}_bias"} if self.centres else {})

    def __getattr__(self, name: str) -> Any:
        if name in ("w", "b") and name in self.weights():
            return self.parameters_of_model.get(self.weights()[name], self.layer_index)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("w", "b") and name in self.weights():
            self.parameters_of_model.set(self.weights()[name], self.layer_index, torch.as_tensor(value))
        else:
            super().__setattr__(name, value)


class LayerNormPre(Norm):
    """LayerNorm without gain and bias: those are folded."""

    centres = True


class RMSNormPre(Norm):
    """RMSNorm without its gain: that is folded."""


class LayerNorm(_WithGain):
    centres = True

    def finish(self, normalized: Tensor) -> Tensor:
        return normalized * self.w + self.b


class RMSNorm(_WithGain):
    def finish(self, normalized: Tensor) -> Tensor:
        return normalized * self.w


NORMS: dict[str, type[Norm]] = {"LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}


def unfolded(cfg: Any) -> str:
    """The kind of a norm that no weight reads from, so that its gain folds into nothing."""
    return cfg.normalization_type.removesuffix("Pre")


class AbstractAttention(WeightModule):
    """One layer's attention: its hook points, and its weights by head."""

    W_Q, b_Q = Weight("q"), Weight("q_bias")
    W_O, b_O = Weight("o"), Weight("o_bias")
    buffers_elsewhere = ("mask", "IGNORE", "rotary_sin", "rotary_cos")

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, facts: Facts, layer: int) -> None:
        super().__init__(parameters_of_model, cfg, layer)
        self.layer_id = layer
        self._attn_scale, self._window = facts.attn_scale, facts.sliding_windows[layer]
        if facts.qk_norm:
            self.q_norm = RMSNorm(parameters_of_model, cfg, "q_norm", layer)
            self.k_norm = RMSNorm(parameters_of_model, cfg, "k_norm", layer)
        self.hook_k = HookPoint()  # [batch, pos, n_key_value_heads, d_head]
        self.hook_q = HookPoint()  # [batch, pos, n_heads, d_head]
        self.hook_v = HookPoint()  # [batch, pos, n_key_value_heads, d_head]
        self.hook_z = HookPoint()  # [batch, pos, n_heads, d_head]
        self.hook_attn_scores = HookPoint()  # [batch, n_heads, query_pos, key_pos]
        self.hook_pattern = HookPoint()  # [batch, n_heads, query_pos, key_pos]
        self.hook_result = HookPoint()  # [batch, pos, n_heads, d_model]
        if facts.positions == "rotary":
            self.hook_rot_k = HookPoint()  # [batch, key_pos, n_key_value_heads, d_head]
            self.hook_rot_q = HookPoint()  # [batch, query_pos, n_heads, d_head]

    @property
    def attn_scale(self) -> float:
        """What q.k is divided by."""
        return self._attn_scale

    @property
    def attn_type(self) -> str:
        return "global" if self._window is None else "local"

    @property
    def mask(self) -> Tensor:
        """Empty, as in TransformerLens 3.9: what may be attended to is decided in the forward."""
        return torch.empty(0, 0, dtype=torch.bool, device=self.cfg.device)

    @mask.setter
    def mask(self, value: Tensor) -> None:
        if value.numel():
            raise Refused("an attention mask cannot be set; edit hook_attn_scores or hook_pattern instead")

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O by head, `[n_heads, d_model, d_model]` in factors."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T by head, `[n_heads, d_model, d_model]` in factors."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: Any = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """The layer's attention on normalized inputs `[batch, pos, d_model]`, as the model's forward computes it."""
        if not (past_kv_cache_entry is additive_attention_mask is position_bias is None):
            raise Refused(
                f"attention called on its own takes no cache entry, additive mask or position bias; {NO_CACHE}"
            )
        return self.run_alone(self, (query_input, key_input, value_input), attention_mask)


class Attention(AbstractAttention):
    W_K, b_K = Weight("k"), Weight("k_bias")
    W_V, b_V = Weight("v"), Weight("v_bias")


class GroupedQueryAttention(AbstractAttention):
    """Fewer key/value heads than query heads: `_W_K` has the K heads, `W_K` each of them once a query head."""

    _W_K, _b_K = Weight("k"), Weight("k_bias")
    _W_V, _b_V = Weight("v"), Weight("v_bias")
    W_K, b_K = Weight("k", repeat=True), Weight("k_bias", repeat=True)
    W_V, b_V = Weight("v", repeat=True), Weight("v_bias", repeat=True)


class SinkAttention(GroupedQueryAttention):
    """Each head's softmax has one logit more, which takes a share and gives no value."""

    sinks = Weight("sinks")


class XIELU(WeightModule):
    """An activation with two learned weights of its own: https://arxiv.org/abs/2411.13010, whose beta is 0.5."""

    alpha_p, alpha_n = Weight("act_alpha_p"), Weight("act_alpha_n")
    buffers_elsewhere = ("beta", "eps")

    def forward(self, x: Tensor) -> Tensor:
        rises = F.softplus(self.alpha_p) * x.square()
        falls = (0.5 + F.softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return torch.where(x > 0, rises, falls) + 0.5 * x


class MLP(WeightModule):
    """`[batch, pos, d_model]` -> act(x W_in + b_in) W_out + b_out."""

    W_in, b_in = Weight("mlp_in"), Weight("mlp_in_bias")
    W_out, b_out = Weight("mlp_out"), Weight("mlp_out_bias")

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, facts: Facts, layer: int) -> None:
        super().__init__(parameters_of_model, cfg, layer)
        self._act_fn = facts.act_fn
        if facts.act_fn == "xielu":
            self._modules["act_fn"] = XIELU(parameters_of_model, cfg, layer)
        self.hook_pre = HookPoint()  # [batch, pos, d_mlp]
        if facts.gated_mlp:
            self.hook_pre_linear = HookPoint()  # [batch, pos, d_mlp]
        self.hook_post = HookPoint()  # [batch, pos, d_mlp]

    @property
    def act_fn(self) -> Callable[[Tensor], Tensor]:
        """The activation. To run with another one, replace this module by one that computes with it."""
        return self._modules.get("act_fn") or ACT2FN[self._act_fn]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        peek = self.parameters_of_model.peek
        return F.linear(x, peek(name, self.layer_index).T, peek(f"{name}_bias", self.layer_index))

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(self.hook_post(self.act_fn(self.hook_pre(self._linear(x, "mlp_in")))), "mlp_out")


class GatedMLP(MLP):
    """`[batch, pos, d_model]` -> (act(x W_gate) * (x W_in)) W_out + b_out."""

    W_gate = Weight("mlp_gate")

    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.hook_pre(self._linear(x, "mlp_gate")))
        return self._linear(self.hook_post(gate * self.hook_pre_linear(self._linear(x, "mlp_in"))), "mlp_out")


class MixtureOfExperts(WeightModule):
    """Experts, a few of which a router picks for each token. Their weights are shown by the engine's model only."""

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, facts: Facts, layer: int) -> None:
        super().__init__(parameters_of_model, cfg, layer)
        self.hook_expert_weights = HookPoint()  # [batch * pos, n_experts]
        self.hook_expert_indices = HookPoint()  # [batch * pos, experts_per_token]

    def forward(self, x: Tensor) -> Tensor:
        raise Refused("a mixture of experts called on its own; call the model, and read hook_mlp_out")


class TransformerBlock(NoParametersApart, nn.Module):
    """One block: attention, MLP, and the points on the stream around them."""

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any, facts: Facts, layer: int) -> None:
        super().__init__()
        self.cfg, self.layer_index = cfg, layer
        object.__setattr__(self, "parameters_of_model", parameters_of_model)
        norm, post_norm, names = NORMS[cfg.normalization_type], NORMS[unfolded(cfg)], mapper.norms(facts)
        self.ln1 = norm(parameters_of_model, cfg, names["ln1"], layer)
        if facts.post_norms:
            self.ln1_post = post_norm(parameters_of_model, cfg, names["ln1_post"], layer)
        self.ln2 = norm(parameters_of_model, cfg, names["ln2"], layer)
        if facts.post_norms:
            self.ln2_post = post_norm(parameters_of_model, cfg, names["ln2_post"], layer)
        attention = Attention if cfg.n_key_value_heads is None else GroupedQueryAttention
        attention = SinkAttention if facts.sinks else attention
        self.attn = attention(parameters_of_model, cfg, facts, layer)
        routed = parameters_of_model.processed.engine.refuses(Address("expert_indices", layer), "read") is None
        mlp = MixtureOfExperts if routed else GatedMLP if facts.gated_mlp else MLP
        self.mlp = mlp(parameters_of_model, cfg, facts, layer)
        self.hook_attn_in = HookPoint()  # [batch, pos, n_heads, d_model]
        self.hook_q_input = HookPoint()  # [batch, pos, n_heads, d_model]
        self.hook_k_input = HookPoint()  # [batch, pos, n_key_value_heads, d_model]
        self.hook_v_input = HookPoint()  # [batch, pos, n_key_value_heads, d_model]
        self.hook_mlp_in = HookPoint()  # [batch, pos, d_model]
        self.hook_attn_out = HookPoint()  # [batch, pos, d_model]
        self.hook_mlp_out = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        if not facts.parallel:
            self.hook_resid_mid = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_post = HookPoint()  # [batch, pos, d_model]

    def forward(
        self,
        resid_pre: Tensor,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """This block alone on a residual `[batch, pos, d_model]`, hooks included."""
        if past_kv_cache_entry is not None or shortformer_pos_embed is not None:
            raise Refused(f"a block called on its own takes no cache entry and no position embedding; {NO_CACHE}")
        return self.run_alone(self, (resid_pre,), attention_mask)


class Unembed(WeightModule):
    """`[batch, pos, d_model]` -> logits `[batch, pos, d_vocab]`."""

    W_U, b_U = Weight("unembed"), Weight("unembed_bias")

    def __init__(self, parameters_of_model: ModelParameters, cfg: Any) -> None:
        super().__init__(parameters_of_model, cfg)
        self.hook_in = HookPoint()  # [batch, pos, d_model]
        self.hook_out = HookPoint()  # [batch, pos, d_vocab]

    def forward(self, residual: Tensor) -> Tensor:
        peek = self.parameters_of_model.peek
        return self.hook_out(F.linear(self.hook_in(residual), peek("unembed").T, peek("unembed_bias")))
