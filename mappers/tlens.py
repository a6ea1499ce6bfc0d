"""TransformerLens hook names <-> addresses, both ways, as a table of rows.

A row is a name, its point, what a family must have for the name to exist, and the `cfg` flag that a HookedTransformer
needs before it fires. `ROWS` stand in the order in which TransformerLens 3.9 registers its HookPoints, so the table is
the layout of the facade's tree too. Names that only its Bridge (3.x, 4.x) knows are `ALIASES`; one means what an edit
there does in the Bridge. A name with no canonical point is in `UNMAPPED` with the reason.
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
class Trait:
    """What a family must have for a name to exist on it. `name` completes the sentence "this family has no ..."."""

    name: str
    holds: Callable[[Facts], bool]

    def __call__(self, facts: Facts) -> bool:
        return self.holds(facts)


EVERY = Trait("", lambda facts: True)
EMBED_NORM = Trait("norm on the token embedding", lambda facts: facts.embed_norm)
PRE_NORMS = Trait("norm before attention and the MLP", lambda facts: facts.pre_norms)
LATE_NORMS = Trait("norm after attention and the MLP only", lambda facts: not facts.pre_norms)
MOE = Trait("mixture of experts", lambda facts: facts.n_experts is not None)
LEARNED = Trait("learned position embedding", lambda facts: facts.positions == "learned")
ALIBI = Trait("linear position bias", lambda facts: facts.positions == "alibi")
ROTARY = Trait("rotary positions", lambda facts: facts.positions == "rotary")
QK_NORM = Trait("norm on queries and keys", lambda facts: facts.qk_norm)
POST_NORMS = Trait("norm after attention and after the MLP", lambda facts: facts.post_norms)
GATED = Trait("gated MLP", lambda facts: facts.gated_mlp)
UNGATED = Trait("MLP without a gate", lambda facts: not facts.gated_mlp)
SEQUENTIAL = Trait("stream between attention and MLP, which run in parallel", lambda facts: not facts.parallel)


@dataclass(frozen=True)
class Row:
    """One name and its point. `has`: whether a family gives the name; `flag`: the `cfg` switch that makes it fire."""

    name: str  # without the `blocks.L.` of a layer's names
    point: str
    has: Trait = EVERY
    flag: str | None = None

    @property
    def layered(self) -> bool:
        return POINTS[self.point].layered


@dataclass(frozen=True)
class Unmapped:
    """One name without a canonical point, and what to use instead."""

    name: str
    reason: str
    has: Trait = EVERY
    layered: bool = True


ROWS: tuple[Row, ...] = (
    Row("embed.ln.hook_scale", "embed_norm_scale", EMBED_NORM),
    Row("embed.ln.hook_normalized", "embed_norm_normalized", EMBED_NORM),
    Row("hook_embed", "embeddings"),
    Row("hook_pos_embed", "pos_embed", LEARNED),
    Row("hook_tokens", "tokens", flag="use_hook_tokens"),
    Row("ln1.hook_scale", "attn_norm_scale", PRE_NORMS),
    Row("ln1.hook_normalized", "attn_norm_normalized", PRE_NORMS),
    Row("ln1.hook_scale", "attn_post_norm_scale", LATE_NORMS),
    Row("ln1.hook_normalized", "attn_post_norm_normalized", LATE_NORMS),
    Row("ln1_post.hook_scale", "attn_post_norm_scale", POST_NORMS),
    Row("ln1_post.hook_normalized", "attn_post_norm_normalized", POST_NORMS),
    Row("ln2.hook_scale", "mlp_norm_scale", PRE_NORMS),
    Row("ln2.hook_normalized", "mlp_norm_normalized", PRE_NORMS),
    Row("ln2.hook_scale", "mlp_post_norm_scale", LATE_NORMS),
    Row("ln2.hook_normalized", "mlp_post_norm_normalized", LATE_NORMS),
    Row("ln2_post.hook_scale", "mlp_post_norm_scale", POST_NORMS),
    Row("ln2_post.hook_normalized", "mlp_post_norm_normalized", POST_NORMS),
    Row("attn.q_norm.hook_scale", "q_norm_scale", QK_NORM),
    Row("attn.q_norm.hook_normalized", "q_norm_normalized", QK_NORM),
    Row("attn.k_norm.hook_scale", "k_norm_scale", QK_NORM),
    Row("attn.k_norm.hook_normalized", "k_norm_normalized", QK_NORM),
    Row("attn.hook_k", "k"),
    Row("attn.hook_q", "q"),
    Row("attn.hook_v", "value"),
    Row("attn.hook_z", "z"),
    Row("attn.hook_attn_scores", "attn_scores"),
    Row("attn.hook_pattern", "attn_probs"),
    Row("attn.hook_result", "attn_result", flag="use_attn_result"),
    Row("attn.hook_rot_k", "k_rot", ROTARY),
    Row("attn.hook_rot_q", "q_rot", ROTARY),
    Row("mlp.hook_pre", "mlp_pre"),
    Row("mlp.hook_pre_linear", "mlp_pre_linear", GATED),
    Row("mlp.hook_post", "mlp_act"),
    Row("mlp.hook_expert_weights", "router_probs", MOE),
    Row("mlp.hook_expert_indices", "expert_indices", MOE),
    Row("hook_attn_in", "attn_stream_in", flag="use_attn_in"),
    Row("hook_q_input", "q_input", flag="use_split_qkv_input"),
    Row("hook_k_input", "k_input", flag="use_split_qkv_input"),
    Row("hook_v_input", "v_input", flag="use_split_qkv_input"),
    Row("hook_mlp_in", "mlp_stream_in", flag="use_hook_mlp_in"),
    Row("hook_attn_out", "attn_out_post"),
    Row("hook_mlp_out", "mlp_out_post"),
    Row("hook_resid_pre", "resid_pre"),
    Row("hook_resid_mid", "resid_mid", SEQUENTIAL),
    Row("hook_resid_post", "resid_post"),
    Row("ln_final.hook_scale", "final_norm_scale"),
    Row("ln_final.hook_normalized", "final_norm_normalized"),
    Row("unembed.hook_in", "final_norm"),
    Row("unembed.hook_out", "lm_head"),
)

# Names of the Bridge for places that HookedTransformer names otherwise, or not at all; of several for one point the
# plainest comes first. The Bridge shows queries and keys around their norms as [batch, heads, pos, d_head].
ALIASES: tuple[Row, ...] = (
    Row("embed.hook_out", "embeddings"),
    Row("pos_embed.hook_out", "pos_embed", LEARNED),
    Row("hook_in", "resid_pre"),
    Row("hook_out", "resid_post"),
    Row("attn.hook_in", "attn_in"),
    Row("ln1.hook_out", "attn_in"),
    Row("attn.hook_attn_in", "attn_stream_in", flag="use_attn_in"),
    Row("attn.hook_q_input", "q_input", flag="use_split_qkv_input"),
    Row("attn.hook_k_input", "k_input", flag="use_split_qkv_input"),
    Row("attn.hook_v_input", "v_input", flag="use_split_qkv_input"),
    Row("attn.q.hook_out", "q"),
    Row("attn.k.hook_out", "k"),
    Row("attn.v.hook_out", "value"),
    Row("attn.q_norm.hook_in", "q_norm_in", QK_NORM),
    Row("attn.q_norm.hook_out", "q_norm_out", QK_NORM),
    Row("attn.hook_q_normed", "q_norm_out", QK_NORM),
    Row("attn.k_norm.hook_in", "k_norm_in", QK_NORM),
    Row("attn.k_norm.hook_out", "k_norm_out", QK_NORM),
    Row("attn.hook_k_normed", "k_norm_out", QK_NORM),
    Row("attn.o.hook_in", "z"),
    Row("attn.hook_out", "attn_out"),
    Row("attn.o.hook_out", "attn_out"),
    Row("ln1_post.hook_in", "attn_out", POST_NORMS),
    Row("ln1_post.hook_out", "attn_out_post", POST_NORMS),
    Row("ln2.hook_in", "mlp_stream_in"),  # an edit of the norm's input leaves the skip as it was
    Row("mlp.hook_in", "mlp_in"),
    Row("ln2.hook_out", "mlp_in"),
    Row("mlp.in.hook_in", "mlp_in", UNGATED),
    Row("mlp.in.hook_out", "mlp_pre", UNGATED),
    Row("mlp.in.hook_out", "mlp_pre_linear", GATED),
    Row("mlp.gate.hook_out", "mlp_pre", GATED),
    Row("mlp.out.hook_in", "mlp_act"),
    Row("mlp.hook_out", "mlp_out"),
    Row("mlp.out.hook_out", "mlp_out"),
    Row("ln2_post.hook_in", "mlp_out", POST_NORMS),
    Row("ln2_post.hook_out", "mlp_out_post", POST_NORMS),
    Row("ln_final.hook_out", "final_norm"),
    Row("hook_unembed", "lm_head"),
)

_CONSTANT = "rotary tables are constants of the positions, not activations"
_BRANCH = "one branch's own copy of attn.hook_in; to edit that branch alone use hook_{}_input"
_SPLIT = "the Bridge runs a fused projection as q, k and v, so this never fires; use {}"
_EXPERT = "an expert runs on the tokens that were routed to it, and all experts in one call; use hook_mlp_out"
_MLP_BRANCH = "one branch's own copy of mlp.hook_in; edit what it is projected to, {}"

UNMAPPED: tuple[Unmapped, ...] = (
    Unmapped("embed.hook_in", "token ids enter here; read them from the input, or from hook_tokens", layered=False),
    Unmapped("pos_embed.hook_in", "position ids enter here; they follow from the attention mask", LEARNED, False),
    Unmapped("hook_pos_embed", "the Bridge lists the name for rotary models too, where it never fires", ROTARY, False),
    Unmapped("hook_pos_embed", "the name is listed, but never fires where positions are linear biases", ALIBI, False),
    Unmapped("rotary_emb.hook_in", "token embeddings pass by here for their dtype only; use hook_embed", ROTARY, False),
    Unmapped("rotary_emb.hook_out", _CONSTANT, ROTARY, False),
    Unmapped("rotary_emb.hook_cos", _CONSTANT, ROTARY, False),
    Unmapped("rotary_emb.hook_sin", _CONSTANT, ROTARY, False),
    Unmapped("attn.hook_cos", _CONSTANT, ROTARY),
    Unmapped("attn.hook_sin", _CONSTANT, ROTARY),
    Unmapped("ln1.hook_in", "what q, k and v read at once; read hook_resid_pre, edit hook_q_input and its like"),
    Unmapped("attn.q.hook_in", _BRANCH.format("q")),
    Unmapped("attn.k.hook_in", _BRANCH.format("k")),
    Unmapped("attn.v.hook_in", _BRANCH.format("v")),
    Unmapped("attn.qkv.hook_in", _SPLIT.format("attn.hook_in")),
    Unmapped("attn.qkv.hook_out", _SPLIT.format("hook_q, hook_k and hook_v")),
    Unmapped("attn.hook_hidden_states", "fires on some families only, with the value of attn.hook_out; use that"),
    Unmapped("mlp.in.hook_in", _MLP_BRANCH.format("mlp.hook_pre_linear"), GATED),
    Unmapped("mlp.gate.hook_in", _MLP_BRANCH.format("mlp.hook_pre"), GATED),
    Unmapped("mlp.experts.{e}.hook_gate", _EXPERT, MOE),
    Unmapped("mlp.experts.{e}.hook_pre", _EXPERT, MOE),
    Unmapped("mlp.experts.{e}.hook_post", _EXPERT, MOE),
    Unmapped("ln_final.hook_in", "the same tensor as the last block's hook_resid_post", layered=False),
)

_ENTRIES: dict[tuple[str, bool], list[Row | Unmapped]] = {}
for _entry in (*ROWS, *ALIASES, *UNMAPPED):
    _ENTRIES.setdefault((_entry.name, _entry.layered), []).append(_entry)
_BLOCK = re.compile(r"blocks\.(0|[1-9][0-9]*)\.(.+)")
_EXPERTS = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")


def names(facts: Facts, *, use_hook_tokens: bool = False) -> list[str]:
    """Every name that a HookedTransformer of this family has, in TransformerLens' order of registration."""
    rows = [row for row in ROWS if row.has(facts) and (row.flag != "use_hook_tokens" or use_hook_tokens)]
    whole = [row.name for row in rows if not row.layered]
    before = [name for name in whole if name.startswith(("embed.", "hook_"))]
    layers = [f"blocks.{layer}.{row.name}" for layer in range(facts.n_layers) for row in rows if row.layered]
    return before + layers + whole[len(before) :]


@lru_cache(maxsize=None)
def to_address(name: str, facts: Facts) -> Address:
    """The address of a full hook name on a family. Raises `UnknownName`, or `Refused` for a name that is unmapped."""
    layer, local = _split(name)
    entry = next((entry for entry in _ENTRIES.get((local, layer is not None), ()) if entry.has(facts)), None)
    if entry is None or (layer is not None and layer >= facts.n_layers):
        raise UnknownName(name, names(facts), what="hook name", hint=_why_absent(local, layer, facts))
    if isinstance(entry, Unmapped):
        raise Refused(f"{name!r} has no canonical point: {entry.reason}")
    return Address(entry.point, layer)


def to_names(address: Address, facts: Facts) -> list[str]:
    """Every TransformerLens name of an address, the HookedTransformer's own first. Empty if it has none."""
    if address.layer is not None and address.layer >= facts.n_layers:
        return []
    prefix = "" if address.layer is None else f"blocks.{address.layer}."
    return [prefix + row.name for row in (*ROWS, *ALIASES) if row.point == address.point and row.has(facts)]


def norms(facts: Facts) -> dict[str, str]:
    """The norms that a family's names speak of: TransformerLens' path -> the canonical norm."""
    ends = (".hook_scale", "_scale")
    return {
        row.name.removesuffix(ends[0]): row.point.removesuffix(ends[1])
        for row in ROWS
        if row.name.endswith(ends[0]) and row.has(facts)
    }


def flag(name: str) -> str | None:
    """The `cfg` switch that must be on before a name fires, or None."""
    layer, local = _split(name)
    entries = _ENTRIES.get((local, layer is not None), ())
    return next((entry.flag for entry in entries if isinstance(entry, Row)), None)


def _split(name: str) -> tuple[int | None, str]:
    match = _BLOCK.fullmatch(name)
    return (int(match[1]), _EXPERTS.sub("{e}", match[2])) if match else (None, name)


def _why_absent(local: str, layer: int | None, facts: Facts) -> str:
    """A sentence for a name that exists in a deeper model, on other families, or with or without a layer."""
    entries = _ENTRIES.get((local, layer is not None), [])
    if any(entry.has(facts) for entry in entries):
        return f"the model has layers 0 to {facts.n_layers - 1}"
    if entries:
        lacking = " and no ".join(dict.fromkeys(entry.has.name for entry in entries))
        return f"{facts.architecture} has no {lacking}, so the name is absent there"
    if (local, layer is None) not in _ENTRIES:
        return ""
    return f"every layer has its own, as in blocks.0.{local}" if layer is None else f"it has no layer; write {local}"
