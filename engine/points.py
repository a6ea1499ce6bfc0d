"""The canonical points: every place in a decoder where an activation can be read or written, as data.

One row a point, in forward order. An `Address` is a point and, for a point that every layer has, a layer.
Shapes use b batch, p position, D d_model, H query heads, K key/value heads, dh head width, M d_mlp, E experts,
V vocabulary, q and k query and key positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import UnknownName


@dataclass(frozen=True)
class Point:
    """One row of the table. `derived` points are computed from a boundary with the layer's weights."""

    name: str
    shape: str
    meaning: str
    layered: bool = True
    derived: bool = False


_ROWS = (
    Point("tokens", "b p", "input ids", layered=False),
    Point("embed_norm_scale", "b p 1", "what a norm on the embedding divides by", layered=False, derived=True),
    Point("embed_norm_normalized", "b p D", "embedding over scale, before gain and bias", layered=False, derived=True),
    Point("embeddings", "b p D", "token embedding as it enters the stream, after any scale", layered=False),
    Point("pos_embed", "b p D", "learned position embedding", layered=False),
    Point("resid_pre", "b p D", "block input"),
    Point("attn_stream_in", "b p H D", "pre-norm stream, one copy a head, for q, k and v", derived=True),
    Point("q_input", "b p H D", "pre-norm stream the queries read, one copy a head", derived=True),
    Point("k_input", "b p K D", "pre-norm stream the keys read, one copy a head", derived=True),
    Point("v_input", "b p K D", "pre-norm stream the values read, one copy a head", derived=True),
    Point("attn_norm_scale", "b p 1", "what the pre-attention norm divides by; seen by q, k and v in turn", derived=True),
    Point("attn_norm_normalized", "b p D", "stream over scale, before gain and bias; q, k and v in turn", derived=True),
    Point("attn_in", "b p D", "what the attention module receives"),
    Point("q", "b p H dh", "queries before QK-norm and rotary"),
    Point("attn_gate", "b p H dh", "gate on attention's output, before its sigmoid"),
    Point("k", "b p K dh", "keys before QK-norm and rotary"),
    Point("value", "b p K dh", "values"),
    Point("q_norm_in", "b p H dh", "input of the query norm"),
    Point("q_norm_scale", "b p H 1", "what the query norm divides by", derived=True),
    Point("q_norm_normalized", "b p H dh", "query over scale, before the gain", derived=True),
    Point("q_norm_out", "b p H dh", "output of the query norm"),
    Point("k_norm_in", "b p K dh", "input of the key norm"),
    Point("k_norm_scale", "b p K 1", "what the key norm divides by", derived=True),
    Point("k_norm_normalized", "b p K dh", "key over scale, before the gain", derived=True),
    Point("k_norm_out", "b p K dh", "output of the key norm"),
    Point("q_rot", "b q H dh", "queries as the dot product sees them"),
    Point("k_rot", "b k K dh", "keys as the dot product sees them, earlier positions included"),
    Point("attn_scores", "b H q k", "after scale, soft cap and mask, before softmax; masked entries are -inf"),
    Point("attn_probs", "b H q k", "softmax output; rows that may attend to nothing are 0"),
    Point("z", "b p H dh", "input of the output projection"),
    Point("attn_result", "b p H D", "z W_O of each head; their sum and the bias are attn_out", derived=True),
    Point("attn_out", "b p D", "attention module output"),
    Point("attn_post_norm_scale", "b p 1", "what the post-attention norm divides by", derived=True),
    Point("attn_post_norm_normalized", "b p D", "attn_out over scale, before the gain", derived=True),
    Point("attn_out_post", "b p D", "what attention adds to the stream"),
    Point("resid_mid", "b p D", "stream between attention and MLP"),
    Point("mlp_stream_in", "b p D", "the MLP branch's own copy of the stream, before its norm"),
    Point("mlp_norm_scale", "b p 1", "what the pre-MLP norm divides by", derived=True),
    Point("mlp_norm_normalized", "b p D", "stream over scale, before gain and bias", derived=True),
    Point("mlp_in", "b p D", "what the MLP receives"),
    Point("router_logits", "b p E", "router output of a mixture of experts, before softmax and top-k"),
    Point("router_probs", "b p E", "softmax over all experts"),
    Point("expert_weights", "b p x", "weights of the x experts that a token goes to, as the checkpoint applies them"),
    Point("expert_indices", "b p x", "which experts a token goes to"),
    Point("mlp_pre", "b p M", "before the activation function (gated: the gate branch)"),
    Point("mlp_pre_linear", "b p M", "up branch of a gated MLP"),
    Point("mlp_act", "b p M", "input of the down projection"),
    Point("mlp_out", "b p D", "MLP output"),
    Point("mlp_post_norm_scale", "b p 1", "what the post-MLP norm divides by", derived=True),
    Point("mlp_post_norm_normalized", "b p D", "mlp_out over scale, before the gain", derived=True),
    Point("mlp_out_post", "b p D", "what the MLP adds to the stream"),
    Point("resid_post", "b p D", "block output"),
    Point("final_norm_scale", "b p 1", "what the final norm divides by", layered=False, derived=True),
    Point("final_norm_normalized", "b p D", "stream over scale, before gain and bias", layered=False, derived=True),
    Point("final_norm", "b p D", "final norm output", layered=False),
    Point("lm_head", "b p V", "unembedding output, before any soft cap", layered=False),
    Point("logits", "b p V", "model output", layered=False),
)

POINTS: dict[str, Point] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Address:
    """A point and, where every layer has it, the layer: `Address("resid_post", 10)`, written `resid_post.10`."""

    point: str
    layer: int | None = None

    def __post_init__(self) -> None:
        row = POINTS.get(self.point)
        if row is None:
            raise UnknownName(self.point, POINTS, what="point")
        if row.layered != (self.layer is not None):
            need = "needs a layer, as in" if row.layered else "has no layer; write"
            raise UnknownName(str(self), (), what="address", hint=f"{self.point} {need} {self._example(row)}")

    @staticmethod
    def _example(row: Point) -> str:
        return f"{row.name}.0" if row.layered else row.name

    @classmethod
    def parse(cls, text: str) -> Address:
        """`"resid_post.10"` or `"logits"`. Raises `UnknownName` for anything else."""
        point, _, layer = text.partition(".")
        return cls(point, int(layer) if layer.isdecimal() else None)

    def __str__(self) -> str:
        return self.point if self.layer is None else f"{self.point}.{self.layer}"
