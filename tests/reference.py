"""The real TransformerLens on the models of the tiny hub, and on the two real ones.

TransformerLens 3.9 reads GPT-2, Pythia and Qwen3 from the checkpoint. For Llama and Gemma-2 names it has the released
sizes built in, so there the sizes are put right between its own two steps, the configuration and the weight conversion;
SmolLM2 is missing from its name list, so the name is added. All else is its own `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Rows = dict[str, Callable[[Any], Any]]  # a field of TL's configuration -> its value in the checkpoint's

DECODER: Rows = {
    "d_model": lambda c: c.hidden_size,
    "d_head": lambda c: c.head_dim,
    "n_heads": lambda c: c.num_attention_heads,
    "n_key_value_heads": lambda c: c.num_key_value_heads,
    "d_mlp": lambda c: c.intermediate_size,
    "n_layers": lambda c: c.num_hidden_layers,
    "n_ctx": lambda c: c.max_position_embeddings,
    "d_vocab": lambda c: c.vocab_size,
    "eps": lambda c: c.rms_norm_eps,
    "rotary_base": lambda c: c.rope_parameters["rope_theta"],
    "rotary_dim": lambda c: c.head_dim,
}
SQUARE: Rows = {
    "d_model": lambda c: c.hidden_size,
    "d_head": lambda c: c.hidden_size // c.num_attention_heads,
    "n_heads": lambda c: c.num_attention_heads,
    "d_mlp": lambda c: c.intermediate_size,
    "n_layers": lambda c: c.num_hidden_layers,
    "n_ctx": lambda c: c.max_position_embeddings,
    "d_vocab": lambda c: c.vocab_size,
    "rotary_base": lambda c: c.rope_parameters["rope_theta"],
    "attn_types": lambda c: ["global"] * c.num_hidden_layers,
}
SIZES: dict[str, Rows] = {
    "meta-llama/Llama-3.2-1B": DECODER
    | {
        "NTK_by_parts_factor": lambda c: c.rope_parameters["factor"],
        "NTK_by_parts_low_freq_factor": lambda c: c.rope_parameters["low_freq_factor"],
        "NTK_by_parts_high_freq_factor": lambda c: c.rope_parameters["high_freq_factor"],
        "NTK_original_ctx_len": lambda c: c.rope_parameters["original_max_position_embeddings"],
    },
    "google/gemma-2b": DECODER | {"act_fn": lambda c: c.hidden_act},
    "google/gemma-2-2b": DECODER
    | {
        "window_size": lambda c: c.sliding_window,
        "attn_types": lambda c: ["local" if kind == "sliding_attention" else "global" for kind in c.layer_types],
        "attn_scale": lambda c: c.query_pre_attn_scalar**0.5,
        "attn_scores_soft_cap": lambda c: c.attn_logit_softcapping,
        "output_logits_soft_cap": lambda c: c.final_logit_softcapping,
    },
    "google/gemma-3-1b-pt": DECODER
    | {
        "rotary_base": lambda c: c.rope_parameters["full_attention"]["rope_theta"],
        "rotary_base_local": lambda c: c.rope_parameters["sliding_attention"]["rope_theta"],
        "window_size": lambda c: c.sliding_window,
        "attn_types": lambda c: ["local" if kind == "sliding_attention" else "global" for kind in c.layer_types],
    },
    "allenai/OLMo-1B-hf": SQUARE,
    "allenai/OLMo-2-0425-1B": SQUARE | {"eps": lambda c: c.rms_norm_eps},
}
UNLISTED = ("HuggingFaceTB/SmolLM2-135M-Instruct",)


def reference_model(name: str, **flags: Any) -> Any:
    """The real `HookedTransformer.from_pretrained(name, **flags)`, with the checkpoint's own sizes."""
    from transformer_lens import HookedTransformer

    with true_sizes():
        return HookedTransformer.from_pretrained(name, **{"device": "cpu"} | flags)


def reference_model_no_processing(name: str, **flags: Any) -> Any:
    """The real `HookedTransformer.from_pretrained_no_processing(name, **flags)`, with the checkpoint's own sizes."""
    from transformer_lens import HookedTransformer

    with true_sizes():
        return HookedTransformer.from_pretrained_no_processing(name, **{"device": "cpu"} | flags)


@contextmanager
def true_sizes() -> Iterator[None]:
    """Inside, TransformerLens knows UNLISTED names, and takes the sizes of the SIZES names from the checkpoint."""
    from transformer_lens import loading_from_pretrained as loading
    from transformers import AutoConfig

    original = loading.convert_hf_model_config

    def convert(model_name: str, **kwargs: Any) -> dict[str, Any]:
        fields = original(model_name, **kwargs)
        rows = SIZES.get(loading.get_official_model_name(model_name), {})
        config = AutoConfig.from_pretrained(model_name) if rows else None
        return fields | {field: read(config) for field, read in rows.items()}

    names = [*loading.OFFICIAL_MODEL_NAMES, *UNLISTED]
    with (
        mock.patch.object(loading, "convert_hf_model_config", convert),
        mock.patch.object(loading, "OFFICIAL_MODEL_NAMES", names),
    ):
        yield
