"""TransformerLens hook names <-> addresses, both ways, as a table of rows.

A row is a name, its point, and the `cfg` flag that a HookedTransformer needs before the name fires. Rows stand in the order
in which TransformerLens 3.9 registers its HookPoints, so the table also is the layout of the facade's tree. Names that only
its Bridge (3.x, 4.x) knows are `ALIASES`. A name with no canonical point is in `UNMAPPED` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from engine.errors import Refused, UnknownName
from engine.points import POINTS, Address
from engine.seam import Facts


@dataclass(frozen=True)
class Row:
    """One name. `has` tells whether a family gives it; `flag` is the `cfg` switch that makes it fire."""

    name: str  # without the `blocks.L.` of a layer's names
    point: str
    has: Callable[[Facts], bool] = lambda facts: True
    flag: str | None = None


def _rotary(facts: Facts) -> bool:
    return facts.positions == "rotary"


def _qk_norm(facts: Facts) -> bool:
    return facts.qk_norm


def _post_norms(facts: Facts) -> bool:
    return facts.post_norms


ROWS: tuple[Row, ...] = (
    Row("hook_embed", "embeddings"),
    Row("hook_pos_embed", "pos_embed", lambda facts: facts.positions == "learned"),
    Row("hook_tokens", "tokens", flag="use_hook_tokens"),
    Row("ln1.hook_scale", "attn_norm_scale"),
    Row("ln1.hook_normalized", "attn_norm_normalized"),
    Row("ln1_post.hook_scale", "attn_post_norm_scale", _post_norms),
    Row("ln1_post.hook_normalized", "attn_post_norm_normalized", _post_norms),
    Row("ln2.hook_scale", "mlp_norm_scale"),
    Row("ln2.hook_normalized", "mlp_norm_normalized"),
    Row("ln2_post.hook_scale", "mlp_post_norm_scale", _post_norms),
    Row("ln2_post.hook_normalized", "mlp_post_norm_normalized", _post_norms),
    Row("attn.q_norm.hook_scale", "q_norm_scale", _qk_norm),
    Row("attn.q_norm.hook_normalized", "q_norm_normalized", _qk_norm),
    Row("attn.k_norm.hook_scale", "k_norm_scale", _qk_norm),
    Row("attn.k_norm.hook_normalized", "k_norm_normalized", _qk_norm),
    Row("attn.hook_k", "k"),
    Row("attn.hook_q", "q"),
    Row("attn.hook_v", "value"),
    Row("attn.hook_z", "z"),
    Row("attn.hook_attn_scores", "attn_scores"),
    Row("attn.hook_pattern", "attn_probs"),
    Row("attn.hook_result", "attn_result", flag="use_attn_result"),
    Row("attn.hook_rot_k", "k_rot", _rotary),
    Row("attn.hook_rot_q", "q_rot", _rotary),
    Row("mlp.hook_pre", "mlp_pre"),
    Row("mlp.hook_pre_linear", "mlp_pre_linear", lambda facts: facts.gated_mlp),
    Row("mlp.hook_post", "mlp_act"),
    Row("hook_attn_in", "attn_stream_in", flag="use_attn_in"),
    Row("hook_q_input", "q_input", flag="use_split_qkv_input"),
    Row("hook_k_input", "k_input", flag="use_split_qkv_input"),
    Row("hook_v_input", "v_input", flag="use_split_qkv_input"),
    Row("hook_mlp_in", "mlp_stream_in", flag="use_hook_mlp_in"),
    Row("hook_attn_out", "attn_out_post"),
    Row("hook_mlp_out", "mlp_out_post"),
    Row("hook_resid_pre", "resid_pre"),
    Row("hook_resid_mid", "resid_mid", lambda facts: not facts.parallel),
    Row("hook_resid_post", "resid_post"),
    Row("ln_final.hook_scale", "final_norm_scale"),
    Row("ln_final.hook_normalized", "final_norm_normalized"),
    Row("unembed.hook_in", "final_norm"),
    Row("unembed.hook_out", "lm_head"),
)

# Names of the Bridge for places that HookedTransformer names otherwise, or not at all.
ALIASES: dict[str, str] = {
    "embed.hook_out": "embeddings",
    "pos_embed.hook_out": "pos_embed",
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "ln1.hook_out": "attn_in",
    "attn.hook_in": "attn_in",
    "attn.q.hook_out": "q",
    "attn.k.hook_out": "k",
    "attn.v.hook_out": "value",
    "attn.q_norm.hook_in": "q_norm_in",
    "attn.q_norm.hook_out": "q_norm_out",
    "attn.k_norm.hook_in": "k_norm_in",
    "attn.k_norm.hook_out": "k_norm_out",
    "attn.o.hook_in": "z",
    "attn.o.hook_out": "attn_out",
    "attn.hook_out": "attn_out",
    "ln1_post.hook_out": "attn_out_post",
    "ln2.hook_in": "resid_mid",
    "ln2.hook_out": "mlp_in",
    "mlp.hook_in": "mlp_in",
    "mlp.gate.hook_out": "mlp_pre",
    "mlp.in.hook_out": "mlp_pre",
    "mlp.out.hook_in": "mlp_act",
    "mlp.out.hook_out": "mlp_out",
    "mlp.hook_out": "mlp_out",
    "ln2_post.hook_out": "mlp_out_post",
    "ln_final.hook_out": "final_norm",
    "hook_unembed": "lm_head",
}

UNMAPPED: dict[str, str] = {
    "embed.hook_in": "token ids enter here; read them from the input",
    "pos_embed.hook_in": "position ids enter here; they follow from the attention mask",
    "ln1.hook_in": "the norm's own copy of the stream: read hook_resid_pre, edit one branch with hook_q_input, hook_k_input, hook_v_input",
    "attn.q.hook_in": "the query's copy of the normalized stream: use hook_q_input or ln1.hook_normalized",
    "attn.k.hook_in": "the key's copy of the normalized stream: use hook_k_input or ln1.hook_normalized",
    "attn.v.hook_in": "the value's copy of the normalized stream: use hook_v_input or ln1.hook_normalized",
    "attn.hook_hidden_states": "the module's returned tuple as a whole; use attn.hook_out",
    "attn.hook_cos": "rotary tables are constants of the positions, not activations",
    "attn.hook_sin": "rotary tables are constants of the positions, not activations",
    "rotary_emb.hook_in": "rotary tables are constants of the positions, not activations",
    "rotary_emb.hook_out": "rotary tables are constants of the positions, not activations",
    "rotary_emb.hook_cos": "rotary tables are constants of the positions, not activations",
    "rotary_emb.hook_sin": "rotary tables are constants of the positions, not activations",
    "ln1_post.hook_in": "the same tensor as attn.hook_out",
    "mlp.in.hook_in": "the same tensor as mlp.hook_in",
    "mlp.gate.hook_in": "the same tensor as mlp.hook_in",
    "ln2_post.hook_in": "the same tensor as mlp.hook_out",
    "ln_final.hook_in": "the same tensor as the last hook_resid_post",
}

_BY_NAME = {row.name: row for row in ROWS}
_BY_POINT = {row.point: row for row in ROWS}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def names(facts: Facts) -> list[str]:
    """Every name that a HookedTransformer of this family has, in TransformerLens' order of registration."""
    rows = [row for row in ROWS if row.has(facts)]
    per_layer = [row.name for row in rows if POINTS[row.point].layered]
    whole = [row.name for row in rows if not POINTS[row.point].layered and row.flag is None]
    before = [name for name in whole if name.startswith("hook_")]
    layers = [f"blocks.{layer}.{name}" for layer in range(facts.n_layers) for name in per_layer]
    return before + layers + [name for name in whole if name not in before]


@lru_cache(maxsize=None)
def to_address(name: str, facts: Facts) -> Address:
    """The address of a full hook name on a family. Raises `UnknownName`, or `Refused` for a name that is unmapped."""
    match = _BLOCK.fullmatch(name)
    layer, local = (int(match[1]), match[2]) if match else (None, name)
    row = _BY_NAME.get(local)
    point = row.point if row is not None and row.has(facts) else ALIASES.get(local)
    if point == "mlp_pre" and local == "mlp.in.hook_out" and facts.gated_mlp:
        point = "mlp_pre_linear"
    if point is None and local in UNMAPPED:
        raise Refused(f"{name!r} has no canonical point: {UNMAPPED[local]}")
    known = point is not None and POINTS[point].layered == (layer is not None)
    if not known or (layer is not None and layer >= facts.n_layers):
        raise UnknownName(name, names(facts), what="hook name")
    return Address(point, layer)


def to_names(address: Address, facts: Facts) -> list[str]:
    """Every TransformerLens name of an address, the HookedTransformer's own first. Empty if it has none."""
    prefix = "" if address.layer is None else f"blocks.{address.layer}."
    row = _BY_POINT.get(address.point)
    own = [row.name] if row is not None and row.has(facts) else []
    candidates = [prefix + name for name in own + list(ALIASES)]
    return [name for name in candidates if _address_or_none(name, facts) == address]


def flag(name: str) -> str | None:
    """The `cfg` switch that must be on before a name fires, or None."""
    match = _BLOCK.fullmatch(name)
    row = _BY_NAME.get(match[2] if match else name)
    return None if row is None else row.flag


def _address_or_none(name: str, facts: Facts) -> Address | None:
    try:
        return to_address(name, facts)
    except (UnknownName, Refused):
        return None
