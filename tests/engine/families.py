"""One tiny random model a family, built from its configuration: the sizes that all share, and what a family has of its own."""

from __future__ import annotations

from typing import Any

import torch

_SIZES = dict(
    vocab_size=211, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=160,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GROUPED = _SIZES | dict(num_key_value_heads=2)
_WIDE = _GROUPED | dict(hidden_size=96, head_dim=32)  # heads that are together wider than the stream
_GPT = dict(vocab_size=211, n_embd=128, n_layer=3, n_head=4, n_positions=64)
_MOE = dict(num_experts=4, num_experts_per_tok=2)
_LOCAL_MOE = dict(num_local_experts=4, num_experts_per_tok=2)
_MLA = _SIZES | dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip

# transformers' name for the family -> its configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "GPTNeo": dict(
        vocab_size=211, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=160, max_position_embeddings=64,
        attention_types=[[["global", "local"], 2]], window_size=4,
    ),
    "GPTJ": _GPT | dict(rotary_dim=16, n_inner=160),
    "CodeGen": _GPT | dict(rotary_dim=16),
    "GPTBigCode": _GPT | dict(n_inner=160),
    "OPT": _SIZES | dict(ffn_dim=160, word_embed_proj_dim=128),
    "Bloom": dict(vocab_size=211, hidden_size=128, n_layer=3, n_head=4),
    "Mpt": dict(vocab_size=211, d_model=128, n_layers=3, n_heads=4, max_seq_len=64),
    "Falcon": _SIZES | dict(new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False, alibi=False),
    "Mistral": _WIDE | dict(sliding_window=4),
    "Mixtral": _WIDE | _LOCAL_MOE,
    "Qwen2": _GROUPED,
    "Qwen3Moe": _WIDE | _MOE | dict(moe_intermediate_size=48, decoder_sparse_step=1),
    "Gemma": _WIDE,
    "Phi": _SIZES | dict(partial_rotary_factor=0.5),
    "Phimoe": _GROUPED | _LOCAL_MOE,
    "StableLm": _GROUPED | dict(partial_rotary_factor=0.5),
    "Olmo": _GROUPED,
    "Olmo2": _GROUPED,
    "Olmo3": _GROUPED | dict(sliding_window=4),
    "Olmoe": _GROUPED | _MOE,
    "Cohere": _GROUPED,
    "Cohere2": _GROUPED | dict(sliding_window=4),
    "Granite": _GROUPED
    | dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0),
    "SmolLM3": _GROUPED | dict(no_rope_layers=[1, 0, 1]),
    "GptOss": _WIDE | _LOCAL_MOE | dict(sliding_window=4),
    "DeepseekV2": _MLA,
    "DeepseekV3": _MLA,
    "Starcoder2": _GROUPED,
    "Glm": _WIDE,
    "Glm4": _WIDE | dict(partial_rotary_factor=0.5),
    "Qwen3Next": _WIDE
    | _MOE
    | dict(
        moe_intermediate_size=48, shared_expert_intermediate_size=48, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "Lfm2": _GROUPED | dict(layer_types=["conv", "full_attention", "conv"]),
    "Mamba": dict(vocab_size=211, hidden_size=96, num_hidden_layers=3, state_size=8),
    "Exaone4": _GROUPED,
    "Nemotron": _GROUPED,
    "Apertus": _GROUPED,
    "HunYuanDenseV1": _WIDE,
    "Persimmon": _SIZES,
}  # fmt: skip
# Points that a family goes past in silence, beside those that its parts rule out.
# DeepSeek-V3 takes a sigmoid; Phi-MoE and GPT-OSS the softmax of a few experts.
UNPROVED = dict.fromkeys(("DeepseekV3", "Phimoe", "GptOss"), {"router_probs"})
STATEFUL = ("Qwen3Next", "Lfm2", "Mamba")  # layers that keep a state of their own, for which a plain key/value cache has no room


def build(name: str) -> Any:
    """A new model of a family with every weight off its beginning, and its norms and biases too."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * (0.1 if weight.dim() < 2 else 0.05))
    return model
