"""Where TransformerLens 3.9 folds a norm along the wrong axis, we are held to Hugging Face instead."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from compat.tlens import HookedTransformer
from tests.hub import HEAD_DIM, SEED, randomise

NAME = "meta-llama/Llama-3.2-1B"
WIDTH = 3 * HEAD_DIM
TOKENS = torch.arange(3, 14)[None]
TOLERANCE = 1e-4  # of the largest logit


def square_llama() -> PreTrainedModel:
    """A tiny Llama whose MLP is as wide as its stream."""
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        max_position_embeddings=64,
        vocab_size=411,
    )
    model = AutoModelForCausalLM.from_config(config)
    randomise(model, SEED)
    return model


def theirs(model: PreTrainedModel, **flags: Any) -> Any:
    """The real library's model, with the sizes of this one."""
    from transformer_lens import HookedTransformer as Real
    from transformer_lens import loading_from_pretrained as loading

    config, original = model.config, loading.convert_hf_model_config
    sizes = dict(
        d_model=WIDTH,
        d_mlp=WIDTH,
        d_head=HEAD_DIM,
        n_heads=4,
        n_key_value_heads=2,
        n_layers=2,
        n_ctx=64,
        d_vocab=411,
        eps=config.rms_norm_eps,
        rotary_base=config.rope_parameters["rope_theta"],
        rotary_dim=HEAD_DIM,
        use_NTK_by_parts_rope=False,
    )

    def convert(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return original(*args, **kwargs) | sizes

    with mock.patch.object(loading, "convert_hf_model_config", convert):
        return Real.from_pretrained(NAME, hf_model=model, device="cpu", **flags)


@torch.no_grad()
def test_norms_fold_where_d_mlp_is_d_model() -> None:
    model = square_llama()
    raw = model(TOKENS).logits
    expected = raw - raw.mean(-1, keepdim=True)
    bound = TOLERANCE * expected.abs().max()
    unfolded = theirs(model, fold_ln=False)(TOKENS)
    assert (unfolded - expected).abs().max() <= bound  # the sizes above are right: folding alone is what goes wrong
    assert (theirs(model)(TOKENS) - expected).abs().max() > 100 * bound
    ours = HookedTransformer.from_pretrained(NAME, hf_model=model, device="cpu")
    assert (ours(TOKENS) - expected).abs().max() <= bound
    w_in = model.model.layers[0].mlp.up_proj.weight.T * model.model.layers[0].post_attention_layernorm.weight[:, None]
    assert torch.equal(ours.blocks[0].mlp.W_in, w_in)
