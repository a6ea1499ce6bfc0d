"""`HookedTransformerConfig`, TransformerLens' description of a model, and the one that an engine's facts give."""

from __future__ import annotations

import math
import pprint
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compat.tlens.errors import require
from compat.tlens.utils import SOFTCAP_DISABLED, SUPPORTED_ACTIVATIONS, get_device, warn_if_mps
from engine.seam import Facts


@dataclass
class HookedTransformerConfig:
    """Sizes, family traits and switches of a model, in TransformerLens' names, order and defaults.

    Left unset, these follow from others: n_heads = d_model // d_head, d_mlp = 4 d_model, d_vocab_out = d_vocab,
    rotary_dim = d_head, attn_scale = sqrt(d_head) (scores are divided by it), initializer_range = 0.8 / sqrt(d_model),
    and device = the best one at hand. n_params counts attention and MLP matrices only. A soft cap of -1 means none.
    A value that means nothing raises `BadArgument`, which is an AssertionError.
    """

    d_model: int
    d_head: int
    n_layers: int
    n_ctx: int
    n_heads: int = -1
    d_mlp: int | None = None
    d_vocab: int = -1
    device: str | None = None
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    default_prepend_bos: bool = True
    positional_embedding_type: str = "standard"
    n_key_value_heads: int | None = None
    attn_only: bool = False
    gated_mlp: bool = False
    uses_rms_norm: bool = False
    eps: float = 1e-5
    layer_norm_folding: bool = False
    act_fn: str = "relu"
    normalization_type: str | None = "LN"
    num_experts: int | None = None
    experts_per_token: int | None = None
    final_rms: bool = False
    dtype: torch.dtype = torch.float32
    model_name: str = "custom"
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_qk_norm: bool = False
    clip_qkv: float | None = None
    use_logn_attn: bool = False
    train_seq_length: int | None = None
    use_dynamic_ntk_rope: bool = False
    use_local_attn: bool = False
    ungroup_grouped_query_attention: bool = False
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    window_size: int | None = None
    attn_types: list | None = None
    init_mode: str = "gpt2"
    n_devices: int = 1
    attention_dir: str = "causal"
    seed: int | None = None
    initializer_range: float = -1.0
    init_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    d_vocab_out: int = -1
    parallel_attn_mlp: bool = False
    rotary_dim: int | None = None
    n_params: int | None = None
    use_hook_tokens: bool = False
    tokenizer_prepends_bos: bool | None = None
    post_embedding_ln: bool = False
    rotary_base: float | int = 10000
    rotary_base_local: float | int | None = None
    rotary_scaling_factor: float = 1.0
    trust_remote_code: bool = False
    rotary_adjacent_pairs: bool = False
    load_in_4bit: bool = False
    quantization_method: str | None = None
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_normalization_before_and_after: bool = False
    attn_scores_soft_cap: float = SOFTCAP_DISABLED
    output_logits_soft_cap: float = SOFTCAP_DISABLED
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_truncate: bool = True
    yarn_global_attn_only: bool = False
    use_attention_sinks: bool = False
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
            if self.d_model % self.d_head:
                raise ValueError(f"d_model ({self.d_model}) must be divisible by d_head ({self.d_head})")
        if self.device is None:
            self.device = get_device()
        else:
            warn_if_mps(self.device)
        if self.d_mlp is None:
            self.d_mlp = 4 * self.d_model
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)
        self._check()

        if self.initializer_range < 0:
            self.initializer_range = 0.8 / math.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = math.sqrt(self.d_head)
        self.n_params = self._count_params()

    def _check(self) -> None:
        if self.use_local_attn:
            require(self.window_size is not None, "window_size must be specified for local attention")
            require(self.attn_types is not None, "attn_types must be specified for local attention")
        if not self.attn_only:
            require(
                self.act_fn in SUPPORTED_ACTIVATIONS,
                f"act_fn={self.act_fn!r} must be one of {sorted(SUPPORTED_ACTIVATIONS)}",
            )
        require(
            (self.num_experts is None) == (self.experts_per_token is None),
            "num_experts and experts_per_token must be set together",
        )
        require(
            self.n_devices <= 1 or torch.cuda.device_count() >= self.n_devices,
            f"n_devices={self.n_devices}, and there are {torch.cuda.device_count()} CUDA devices",
        )
        require(
            self.default_prepend_bos in (True, False),
            f"default_prepend_bos must be True or False, not {self.default_prepend_bos!r}",
        )

    def _count_params(self) -> int:
        """Attention and MLP matrices, as if every head had keys and values of its own (TransformerLens' count)."""
        attention = 4 * self.d_model * self.d_head * self.n_heads
        if self.attn_only:
            return self.n_layers * attention
        mlp = self.d_model * self.d_mlp * (2 + self.gated_mlp)
        if self.num_experts:
            mlp = (mlp + self.d_model) * self.num_experts
        return self.n_layers * (attention + mlp)

    @classmethod
    def unwrap(cls, config: dict[str, Any] | Any) -> HookedTransformerConfig:
        """The config itself, or the one that a dictionary (or another kind of config) describes."""
        if isinstance(config, cls):
            return config
        return cls.from_dict(config if isinstance(config, dict) else config.to_dict())

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> HookedTransformerConfig:
        """A config from its fields. Raises TypeError for a field that does not exist."""
        return cls(**config_dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields; the live dictionary, so that writing to it writes to the config."""
        return self.__dict__

    def __repr__(self) -> str:
        return "HookedTransformerConfig:\n" + pprint.pformat(self.to_dict())

    def set_seed_everywhere(self, seed: int) -> None:
        """Seed torch, random and numpy."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def is_layer_norm_activation(self) -> bool:
        """Whether the activation is followed by a LayerNorm inside the MLP (SoLU's `_ln` kind)."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")


# What TransformerLens decides by family rather than by a value of the checkpoint.
WITHOUT_BOS = ("GPTNeoX", "Bloom", "QWen", "Qwen", "PhiForCausalLM")
FINAL_RMS = ("Llama", "QWen", "Qwen", "Gemma", "GptOss", "Apertus")
ALWAYS_GROUPED = ("Qwen2", "Mistral", "Mixtral", "Gemma", "GptOss", "Olmo3", "Olmoe")
ALWAYS_ATTN_TYPES = ("Mixtral", "Olmo")
BLOOM_N_CTX = 2048  # its biases know no limit, and its config states none

POSITIONS = {"learned": "standard"}
ACTIVATIONS = {"swish": "silu", "gelu_python": "gelu"}
NORMS = {("layer", False): "LN", ("layer", True): "LNPre", ("rms", False): "RMS", ("rms", True): "RMSPre"}


def config_from_facts(
    facts: Facts,
    *,
    model_name: str | None = None,
    fold_ln: bool = True,
    default_prepend_bos: bool | None = None,
    **fields: Any,
) -> HookedTransformerConfig:
    """The config that `from_pretrained` gives the model that an engine serves.

    model_name: hub id or folder; its last part becomes `cfg.model_name`. default_prepend_bos: None means the family's
    own. fields: fields of the config that the facts cannot know (n_devices, checkpoint_value, ...) or that the
    caller overrides.
    """
    name = model_name or facts.model_id
    family = facts.architecture.startswith
    windows = set(facts.sliding_windows) - {None}
    values: dict[str, Any] = dict(
        d_model=facts.d_model,
        d_head=facts.d_head,
        n_layers=facts.n_layers,
        n_ctx=BLOOM_N_CTX if family("Bloom") else facts.n_ctx,
        n_heads=facts.n_heads,
        n_key_value_heads=facts.n_kv_heads if facts.n_kv_heads != facts.n_heads or family(ALWAYS_GROUPED) else None,
        d_mlp=facts.d_mlp,
        d_vocab=facts.d_vocab,
        eps=facts.eps,
        gated_mlp=facts.gated_mlp,
        parallel_attn_mlp=facts.parallel,
        num_experts=facts.n_experts,
        experts_per_token=facts.experts_per_token,
        normalization_type=NORMS[facts.norm, fold_ln],
        final_rms=family(FINAL_RMS),
        post_embedding_ln=facts.embed_norm,
        use_qk_norm=facts.qk_norm and not facts.qk_norm_joint,
        use_normalization_before_and_after=facts.post_norms,
        positional_embedding_type=POSITIONS.get(facts.positions, facts.positions),
        use_attn_scale=facts.attn_scale != 1,
        attn_scale=facts.attn_scale if facts.attn_scale != 1 else -1.0,
        attn_scores_soft_cap=facts.attn_softcap or SOFTCAP_DISABLED,
        output_logits_soft_cap=facts.logit_softcap or SOFTCAP_DISABLED,
        use_local_attn=bool(windows),
        window_size=max(windows, default=None),
        attn_types=_attn_types(facts.sliding_windows) if windows or family(ALWAYS_ATTN_TYPES) else None,
        dtype=facts.dtype,
        device=str(facts.device),
        original_architecture=facts.architecture,
        model_name=name.rstrip("/").rsplit("/", 1)[-1],
        tokenizer_name=name,
        init_weights=False,
        default_prepend_bos=not family(WITHOUT_BOS) if default_prepend_bos is None else default_prepend_bos,
    )
    if facts.positions == "rotary":
        values |= dict(
            rotary_dim=facts.rotary_dim,
            rotary_base=facts.rotary_base,
            rotary_adjacent_pairs=facts.rotary_adjacent_pairs,
        )
    config = HookedTransformerConfig(**(values | fields))
    # Set last: a checkpoint may use an activation without a TransformerLens name, a config built by hand may not.
    config.act_fn = fields.get("act_fn", ACTIVATIONS.get(facts.act_fn, facts.act_fn))
    return config


def _attn_types(windows: Iterable[int | None]) -> list[str]:
    return ["global" if window is None else "local" for window in windows]
