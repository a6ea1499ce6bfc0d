"""The tiny models of the hub, as data: a name, a configuration, a tokenizer. A family costs one row.

No two sizes coincide that a wrong axis could confuse, and a sliding window is shorter than a test prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.hub_tokenizers import gemma_tokenizer, gpt2_tokenizer, llama_tokenizer, neox_tokenizer, qwen_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes too


@dataclass(frozen=True)
class Family:
    """One tiny model: the name it is found under, its configuration, and its tokenizer."""

    name: str
    config_class: str
    config: dict[str, Any]
    tokenizer: Callable[[int], PreTrainedTokenizerBase]
    tokenizer_size: int
    sharpness: float = 1.3  # how much a matrix enlarges what it acts on, so that attention is far from uniform
    gain: float = 1.0  # what a norm weight varies around: 0 where the family adds 1 to it
    extra_config: dict[str, Any] = field(default_factory=dict)  # written to config.json as it is


# one for each mechanism that TransformerLens knows: everything is held against it on these
FAMILIES = (
    Family(
        "gpt2",
        "GPT2Config",
        # TL reads n_ctx and assumes n_inner = 4 n_embd
        dict(n_layer=3, n_head=4, n_embd=4 * HEAD_DIM, n_positions=72, vocab_size=403),
        gpt2_tokenizer,
        403,
        extra_config=dict(n_ctx=72),
    ),
    Family(
        "EleutherAI/pythia-70m",
        "GPTNeoXConfig",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            hidden_size=4 * HEAD_DIM,
            intermediate_size=320,
            max_position_embeddings=88,
            vocab_size=420,  # padded beyond the tokenizer, as Pythia's is
            hidden_act="gelu",
            rotary_pct=0.25,
            use_parallel_residual=True,
            tie_word_embeddings=False,
        ),
        neox_tokenizer,
        404,
    ),
    Family(
        "meta-llama/Llama-3.2-1B",
        "LlamaConfig",
        dict(
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=96,
            intermediate_size=224,
            max_position_embeddings=112,
            vocab_size=411,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=28,
            ),
        ),
        llama_tokenizer,
        411,
    ),
    Family(
        "Qwen/Qwen3-0.6B",
        "Qwen3Config",
        dict(
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=112,
            intermediate_size=240,
            max_position_embeddings=120,
            vocab_size=424,  # padded beyond the tokenizer, as Qwen's is
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
        qwen_tokenizer,
        408,
    ),
    Family(
        "google/gemma-2-2b",
        "Gemma2Config",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            hidden_size=80,
            intermediate_size=208,
            max_position_embeddings=104,
            vocab_size=437,
            sliding_window=6,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=4.0,  # low enough to bend these scores and logits
            final_logit_softcapping=5.0,
        ),
        gemma_tokenizer,
        437,
        gain=0.0,
    ),
)

# what the rows below share; several of TransformerLens' configurations assume that all heads fill the stream
_SQUARE = dict(
    num_hidden_layers=3, num_attention_heads=4, hidden_size=4 * HEAD_DIM, intermediate_size=224,
    max_position_embeddings=112,
)  # fmt: skip
_GROUPED = _SQUARE | dict(num_key_value_heads=2)
_GPT = dict(n_layer=3, n_head=4, n_embd=4 * HEAD_DIM, n_positions=72, vocab_size=403)
_WINDOW_6 = dict(num_hidden_layers=4, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2)
_EXPERTS = dict(num_local_experts=5, num_experts_per_tok=2)

# the other families that TransformerLens 3.9 loads
FURTHER = (
    Family(
        "EleutherAI/gpt-neo-125M",
        "GPTNeoConfig",
        dict(num_layers=4, num_heads=4, hidden_size=4 * HEAD_DIM, max_position_embeddings=72, vocab_size=403,
             attention_types=[[["global", "local"], 2]], window_size=6),
        gpt2_tokenizer,
        403,
        sharpness=0.55,  # its scores are not divided by sqrt(d_head)
    ),
    Family("EleutherAI/gpt-j-6B", "GPTJConfig", _GPT | dict(rotary_dim=16), gpt2_tokenizer, 403),
    Family(
        "facebook/opt-125m",
        "OPTConfig",
        dict(num_hidden_layers=3, num_attention_heads=4, hidden_size=4 * HEAD_DIM, ffn_dim=224,
             word_embed_proj_dim=4 * HEAD_DIM, max_position_embeddings=72, vocab_size=403),
        gpt2_tokenizer,
        403,
    ),
    Family(
        "bigscience/bloom-560m",
        "BloomConfig",
        dict(n_layer=3, n_head=4, hidden_size=4 * HEAD_DIM, vocab_size=420),
        gpt2_tokenizer,
        403,
    ),
    Family(
        "mistralai/Mistral-7B-v0.1",
        "MistralConfig",
        _GROUPED | dict(hidden_size=96, head_dim=HEAD_DIM, vocab_size=411, sliding_window=6),
        llama_tokenizer,
        411,
    ),
    Family(
        "mistralai/Mixtral-8x7B-v0.1",
        "MixtralConfig",
        _GROUPED | _EXPERTS | dict(vocab_size=411),
        llama_tokenizer,
        411,
    ),
    Family("Qwen/Qwen2-0.5B", "Qwen2Config", _GROUPED | dict(vocab_size=424), qwen_tokenizer, 408),
    Family(
        "google/gemma-2b",
        "GemmaConfig",
        _GROUPED | dict(num_key_value_heads=1, hidden_size=96, head_dim=HEAD_DIM, vocab_size=437),
        gemma_tokenizer,
        437,
        gain=0.0,
    ),
    Family(
        "google/gemma-3-1b-pt",
        "Gemma3TextConfig",
        _GROUPED
        | _WINDOW_6
        | dict(num_key_value_heads=1, hidden_size=96, head_dim=HEAD_DIM, vocab_size=437, query_pre_attn_scalar=HEAD_DIM),
        gemma_tokenizer,
        437,
        gain=0.0,
    ),
    Family(
        "microsoft/phi-1", "PhiConfig", _SQUARE | dict(vocab_size=403, partial_rotary_factor=0.5), gpt2_tokenizer, 403
    ),
    Family(
        "microsoft/Phi-3-mini-4k-instruct",
        "Phi3Config",
        _GROUPED | dict(vocab_size=411, original_max_position_embeddings=112, sliding_window=6),
        llama_tokenizer,
        411,
    ),
    Family("allenai/OLMo-1B-hf", "OlmoConfig", _SQUARE | dict(vocab_size=411), llama_tokenizer, 411),
    Family("allenai/OLMo-2-0425-1B", "Olmo2Config", _SQUARE | dict(vocab_size=411), llama_tokenizer, 411),
    Family("allenai/Olmo-3-1025-7B", "Olmo3Config", _GROUPED | _WINDOW_6 | dict(vocab_size=411), llama_tokenizer, 411),
    Family(
        "allenai/OLMoE-1B-7B-0924",
        "OlmoeConfig",
        _GROUPED | dict(vocab_size=411, num_experts=5, num_experts_per_tok=2),
        llama_tokenizer,
        411,
    ),
    Family(
        "openai/gpt-oss-20b",
        "GptOssConfig",
        _GROUPED
        | _WINDOW_6
        | _EXPERTS
        | dict(hidden_size=96, head_dim=HEAD_DIM, vocab_size=411, rope_parameters=dict(rope_type="default", rope_theta=150000.0)),
        llama_tokenizer,
        411,
    ),
    Family(
        "swiss-ai/Apertus-8B-2509",
        "ApertusConfig",
        _GROUPED | dict(vocab_size=411, rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
        llama_tokenizer,
        411,
    ),
)
