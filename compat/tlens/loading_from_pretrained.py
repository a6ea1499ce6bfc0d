"""Model names and what can be said of a model before it is loaded: TransformerLens' `loading_from_pretrained`.

Names and aliases of TransformerLens resolve to the same hub ids. Beyond those, a local folder and any other hub id
`org/name` are taken as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import torch

from compat.tlens.errors import UnknownModel, require
from compat.tlens.HookedTransformerConfig import HookedTransformerConfig, config_from_facts
from compat.tlens.supported_models import DEFAULT_MODEL_ALIASES, MODEL_ALIASES, OFFICIAL_MODEL_NAMES
from engine.errors import BadInput, Refused
from engine.seam import Facts

__all__ = [
    "DEFAULT_MODEL_ALIASES",
    "MODEL_ALIASES",
    "NEED_REMOTE_CODE_MODELS",
    "NON_HF_HOSTED_MODEL_NAMES",
    "OFFICIAL_MODEL_NAMES",
    "PYTHIA_CHECKPOINTS",
    "PYTHIA_V0_CHECKPOINTS",
    "STANFORD_CRFM_CHECKPOINTS",
    "convert_hf_model_config",
    "get_checkpoint_labels",
    "get_num_params_of_pretrained",
    "get_official_model_name",
    "get_pretrained_model_config",
    "make_model_alias_map",
]

# Listed by TransformerLens, and on no hub: a model with such a name comes in through hf_model.
NON_HF_HOSTED_MODEL_NAMES = [f"llama-{size}-hf" for size in ("7b", "13b", "30b", "65b")]

# Beginnings of the names that TransformerLens loads with trust_remote_code.
NEED_REMOTE_CODE_MODELS = (
    "bigcode/santacoder",
    "Qwen/Qwen-",
    "Qwen/Qwen3-",
    "microsoft/phi-2",
    "microsoft/phi-4",
    "apple/OpenELM",
    "openai/gpt-oss-",
    "swiss-ai/Apertus-",
)

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def make_model_alias_map() -> dict[str, str]:
    """Every alias and every hub id in lower case, to the hub id."""
    return {
        known.lower(): name for name in OFFICIAL_MODEL_NAMES for known in (*MODEL_ALIASES.get(name, ()), name)
    }


def get_official_model_name(model_name: str | os.PathLike[str]) -> str:
    """The hub id of a name or alias (case does not count). A local folder and any other hub id stand for themselves.

    Raises `UnknownModel`, a ValueError, with the nearest names.
    """
    name = os.fspath(model_name)
    known = make_model_alias_map()
    if name.lower() in known:
        return known[name.lower()]
    if (name and Path(name).is_dir()) or HUB_ID.fullmatch(name):
        return name
    shown = [spelling for official in OFFICIAL_MODEL_NAMES for spelling in (official, *MODEL_ALIASES.get(official, ()))]
    hint = "A model may also be a hub id 'org/name' or a local folder that exists."
    raise UnknownModel(name, shown, what="model name", hint=hint)


STANFORD_CRFM_CHECKPOINTS = [
    *range(0, 100, 10),
    *range(100, 2000, 50),
    *range(2000, 20000, 100),
    *range(20000, 400001, 1000),
]
PYTHIA_V0_CHECKPOINTS = [*range(1000, 143001, 1000)]
PYTHIA_CHECKPOINTS = [0, *(2**power for power in range(10)), *PYTHIA_V0_CHECKPOINTS]

# Beginning of a hub id -> (the steps that have a checkpoint, the revision that holds one); the first that fits counts.
CHECKPOINTS = {
    r"stanford-crfm/": (STANFORD_CRFM_CHECKPOINTS, "checkpoint-{}"),
    r"EleutherAI/pythia.*v0": (PYTHIA_V0_CHECKPOINTS, "step{}"),
    r"EleutherAI/pythia": (PYTHIA_CHECKPOINTS, "step{}"),
}


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], Literal["step"]]:
    """(the training steps that checkpoints exist for, "step"). Raises ValueError for a model without checkpoints."""
    steps, _ = _checkpoints(model_name)
    return steps, "step"


def checkpoint_fields(model_name: str, checkpoint_index: int | None, checkpoint_value: int | None) -> dict[str, Any]:
    """The checkpoint fields of the config: for the checkpoint at an index or with a value; none wanted gives none."""
    if checkpoint_index is None and checkpoint_value is None:
        return {}
    labels, label_type = get_checkpoint_labels(model_name)
    if checkpoint_index is None:
        require(
            checkpoint_value in labels, f"Checkpoint value {checkpoint_value} is not in list of available checkpoints"
        )
        checkpoint_index = labels.index(checkpoint_value)
    return dict(
        from_checkpoint=True,
        checkpoint_label_type=label_type,
        checkpoint_index=checkpoint_index,
        checkpoint_value=labels[checkpoint_index],
    )


def checkpoint_revision(model_name: str, checkpoint_value: int) -> str:
    """The hub revision that holds a model at a training step."""
    _, revision = _checkpoints(model_name)
    return revision.format(checkpoint_value)


def _checkpoints(model_name: str) -> tuple[list[int], str]:
    name = get_official_model_name(model_name)
    for beginning, checkpoints in CHECKPOINTS.items():
        if re.match(beginning, name):
            return checkpoints
    raise BadInput(f"Model {name} is not checkpointed.")


# What a family's config leaves unsaid. Only families whose facts follow from the config alone are here.
CONFIG_TRAITS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": dict(norm="layer", positions="learned", gated_mlp=False),
    "GPTNeoXForCausalLM": dict(norm="layer", gated_mlp=False),
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": dict(qk_norm=True),
    "Gemma2ForCausalLM": dict(post_norms=True),
}
PLAIN_TRAITS: dict[str, Any] = dict(norm="rms", positions="rotary", gated_mlp=True, qk_norm=False, post_norms=False)


def facts_from_hf_config(hf_config: Any, model_id: str, dtype: torch.dtype, device: Any) -> Facts:
    """The facts of a model that is not loaded. Refuses a family that its config does not describe fully."""
    architecture = (hf_config.architectures or [type(hf_config).__name__])[0]
    if architecture not in CONFIG_TRAITS:
        raise Refused(
            f"the config of {model_id} alone does not tell enough of a {architecture}; load the model and read its cfg"
        )
    traits = PLAIN_TRAITS | CONFIG_TRAITS[architecture]
    d_head = _first(hf_config, "head_dim") or hf_config.hidden_size // hf_config.num_attention_heads
    rope = _first(hf_config, "rope_parameters") or {}
    return Facts(
        model_id=model_id,
        architecture=architecture,
        n_layers=hf_config.num_hidden_layers,
        d_model=hf_config.hidden_size,
        n_heads=hf_config.num_attention_heads,
        n_kv_heads=_first(hf_config, "num_key_value_heads") or hf_config.num_attention_heads,
        d_head=d_head,
        d_mlp=_first(hf_config, "intermediate_size", "n_inner") or 4 * hf_config.hidden_size,
        d_vocab=hf_config.vocab_size,
        n_ctx=hf_config.max_position_embeddings,
        eps=_first(hf_config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        act_fn=_first(hf_config, "hidden_activation", "hidden_act", "activation_function"),
        parallel=bool(_first(hf_config, "use_parallel_residual")),
        rotary_dim=int(d_head * rope.get("partial_rotary_factor", 1.0)) if rope else 0,
        rotary_base=float(rope.get("rope_theta", 10000.0)),
        rotary_adjacent_pairs=False,
        attn_scale=(_first(hf_config, "query_pre_attn_scalar") or d_head) ** 0.5,
        attn_softcap=_first(hf_config, "attn_logit_softcapping"),
        logit_softcap=_first(hf_config, "final_logit_softcapping"),
        sliding_windows=_sliding_windows(hf_config),
        n_experts=None,
        experts_per_token=None,
        dtype=dtype,
        device=device,
        **traits,
    )


def _first(hf_config: Any, *names: str) -> Any:
    """The first of these attributes that the config has and that is not None."""
    return next((value for name in names if (value := getattr(hf_config, name, None)) is not None), None)


def _sliding_windows(hf_config: Any) -> tuple[int | None, ...]:
    window, n_layers = _first(hf_config, "sliding_window"), hf_config.num_hidden_layers
    kinds = _first(hf_config, "layer_types") or ["sliding_attention" if window else "full_attention"] * n_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def fields_from_hf_config(hf_config: Any) -> dict[str, Any]:
    """Fields of the config that an engine's facts leave out: llama3 rope scaling, and scaling by the layer's index."""
    fields = {}
    if _first(hf_config, "scale_attn_by_inverse_layer_idx"):
        fields["scale_attn_by_inverse_layer_idx"] = True
    rope = _first(hf_config, "rope_parameters", "rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        fields |= dict(
            use_NTK_by_parts_rope=True,
            NTK_by_parts_low_freq_factor=rope["low_freq_factor"],
            NTK_by_parts_high_freq_factor=rope["high_freq_factor"],
            NTK_by_parts_factor=rope["factor"],
            NTK_original_ctx_len=rope["original_max_position_embeddings"],
        )
    return fields


def get_pretrained_model_config(
    model_name: str,
    hf_cfg: dict[str, Any] | None = None,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """The config of a model, from its Hugging Face config; no weights are read.

    hf_cfg: the config of an already loaded model as a dictionary; its vocabulary size counts. kwargs go to
    `AutoConfig.from_pretrained`.
    """
    from transformers import AutoConfig

    name = get_official_model_name(model_name)
    hf_config = AutoConfig.from_pretrained(name, **kwargs)
    wanted = dict(n_layers=first_n_layers, n_ctx=n_ctx, d_vocab=(hf_cfg or {}).get("vocab_size"))
    return config_from_facts(
        facts_from_hf_config(hf_config, name, dtype, device),
        fold_ln=fold_ln,
        default_prepend_bos=default_prepend_bos,
        device=device,
        n_devices=n_devices,
        **fields_from_hf_config(hf_config),
        **checkpoint_fields(name, checkpoint_index, checkpoint_value),
        **{field: value for field, value in wanted.items() if value is not None},
    )


def convert_hf_model_config(model_name: str, **kwargs: Any) -> dict[str, Any]:
    """The fields of a model's config, as a dictionary."""
    return dict(get_pretrained_model_config(model_name, **kwargs).to_dict())


def get_num_params_of_pretrained(model_name: str) -> int:
    """How many parameters a model's attention and MLP matrices have."""
    return get_pretrained_model_config(model_name).n_params
