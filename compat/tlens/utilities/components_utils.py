"""Short forms of activation names."""

from __future__ import annotations

import re

_SHORT_FORM = re.compile(r"([a-z]+)(\d+)([a-z]?.*)")

_NAME_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}

_LAYER_TYPE_ALIASES = {"a": "attn", "attention": "attn", "m": "mlp", "b": "", "block": "", "blocks": ""}

_SUBLAYER_OF_NAME = {
    **dict.fromkeys(("q", "k", "v", "z", "rot_q", "rot_k", "result", "pattern", "attn_scores"), "attn"),
    **dict.fromkeys(("pre", "mid", "post", "pre_linear"), "mlp"),
}

_NORM_NAMES = ("scale", "normalized")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The full name of an activation: ("k", 6) or "k6" is "blocks.6.attn.hook_k".

    A letters-digits-rest form is split into name, layer and layer type ("scale4ln1" is "blocks.4.ln1.hook_scale"); one
    with an underscore before its digits is not. A full name passes through; "scale" and "normalized" without a layer
    belong to the final norm. Nothing is checked against a model.
    """
    if layer is None and layer_type is None and ("." in name or name.startswith("hook_")):
        return name
    if short := _SHORT_FORM.match(name):
        name, layer, layer_type = short.groups()
    name = _NAME_ALIASES.get(name, name)
    sublayer = _SUBLAYER_OF_NAME.get(name) or _LAYER_TYPE_ALIASES.get(layer_type, layer_type)

    parts = [f"hook_{name}"]
    if sublayer:
        parts.insert(0, sublayer)
    if layer is not None:
        parts.insert(0, f"blocks.{layer}")
    elif name in _NORM_NAMES:
        parts.insert(0, "ln_final")
    return ".".join(parts)
