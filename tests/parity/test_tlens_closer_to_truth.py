"""Our float32 activations are no farther from the truth than TransformerLens' are. Run with -s to see the two side by side.

The truth is a run of the raw Hugging Face model in float64, with what transformers does in float32 whatever the dtype
(RMSNorm, rotary angles) written out in float64, and with the processing applied to its activations by formula.
"""

from __future__ import annotations

import math
import re
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compat.tlens import HookedTransformer
from demo.real_models import SMOLLM2
from tests.hub import NAMES, ensure_real
from tests.parity.pairs import Pair, new_pair, random_tokens, shared_pair

SHARE = 1.25  # of TransformerLens' error, that ours may be
FLOOR = 2e-7  # of the largest magnitude: two units in the last place of float32
PROMPTS = 4


def true_model(name: str) -> Any:
    """The raw model, in float64 throughout."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64, attn_implementation="eager")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = MethodType(rotary, module)
    return model


def rms_norm(self: nn.Module, x: Tensor) -> Tensor:
    gain = self.weight + 1 if type(self).__name__.startswith("Gemma") else self.weight
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def rotary(self: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * inverse_frequencies(self.config)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def inverse_frequencies(config: Any) -> Tensor:
    """`[rotary_dim / 2]`. Source of the scaled ones: the Llama 3.1 release."""
    rope = config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(width * rope.get("partial_rotary_factor", 1.0))
    plain = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if rope["rope_type"] == "default":
        return plain
    assert rope["rope_type"] == "llama3"
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / rope["factor"]


def true_activations(raw: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The processed activations of a raw float64 model, by formula."""
    logits, cache = raw.run_with_cache(tokens)
    values = {**cache, "logits": logits}
    values["unembed.hook_in"] = values["ln_final.hook_normalized"]
    if raw.cfg.output_logits_soft_cap <= 0:
        for name in ("unembed.hook_out", "logits"):
            values[name] = centred(values[name])
    if raw.cfg.normalization_type != "LN":
        return values
    for name in values:
        if name in ("hook_embed", "hook_pos_embed") or name.endswith(("resid_pre", "resid_mid", "resid_post", "_out")):
            values[name] = centred(values[name])
    for layer, block in enumerate(raw.blocks):
        offset = block.attn.b_V + torch.einsum("d,hdk->hk", block.ln1.b, block.attn.W_V)
        for name in ("v", "z"):
            values[f"blocks.{layer}.attn.hook_{name}"] = values[f"blocks.{layer}.attn.hook_{name}"] - offset
    return values


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each name as a share of the largest magnitude."""
    off = {}
    for name, value in truth.items():
        finite = value.isfinite()
        off[name] = float((found[name].double() - value)[finite].abs().max() / value[finite].abs().max())
    return off


def group(name: str) -> str:
    """A name without its layer."""
    return re.sub(r"^blocks\.\d+\.", "", name)


@torch.no_grad()
def compare(pair: Pair, raw: Any, prompts: list[Tensor]) -> dict[str, tuple[float, float]]:
    """(our, their) largest error by group of names, over all prompts."""
    worst: dict[str, tuple[float, float]] = {}
    for tokens in prompts:
        truth = true_activations(raw, tokens)
        both = []
        for model in (pair.ours, pair.theirs):
            logits, cache = model.run_with_cache(tokens)
            both.append(errors({**cache, "logits": logits}, truth))
        for name in truth:
            before = worst.get(group(name), (0.0, 0.0))
            worst[group(name)] = tuple(max(old, new[name]) for old, new in zip(before, both))
    return worst


def assert_no_farther(name: str, worst: dict[str, tuple[float, float]]) -> None:
    print(f"\n{name}: largest error against float64, as a share of the largest magnitude\n{'':32}{'ours':>10}{'theirs':>10}")
    rows = worst | {"the worst of all": tuple(map(max, zip(*worst.values())))}
    rows |= {"the mean of all": tuple(sum(side) / len(worst) for side in zip(*worst.values()))}
    for what, (ours, theirs) in rows.items():
        print(f"{what:32}{ours:10.1e}{theirs:10.1e}")
    farther = {what: row for what, row in rows.items() if row[0] > SHARE * row[1] + FLOOR}
    assert not farther, farther
    assert max(row[0] for row in rows.values()) < 1e-5


def raw_in_float64(name: str) -> Any:
    return HookedTransformer.from_pretrained_no_processing(name, hf_model=true_model(name), dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_no_farther_from_the_truth_than_theirs(name: str) -> None:
    pair = shared_pair(name, True)
    prompts = [random_tokens(pair, rows=3, pos=24, seed=seed) for seed in range(PROMPTS)]
    assert_no_farther(name, compare(pair, raw_in_float64(name), prompts))


@pytest.mark.slow
def test_activations_of_a_real_model_are_no_farther_from_the_truth_than_theirs() -> None:
    ensure_real(SMOLLM2)
    pair = new_pair(SMOLLM2)
    texts = ["When Mary and John went to the store, John gave a drink to", "The cat sat on the mat. The dog sat on the"]
    prompts = [pair.theirs.to_tokens(text) for text in texts]
    assert_no_farther(SMOLLM2, compare(pair, raw_in_float64(SMOLLM2), prompts))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_truth_is_the_raw_model_in_float64(name: str) -> None:
    """The yardstick: read through taps, it is the plain run of the very same model; and near the float32 one."""
    pair, model = shared_pair(name, True), true_model(name)
    tokens = random_tokens(pair)
    plain = model(tokens, output_hidden_states=True)
    raw = HookedTransformer.from_pretrained_no_processing(name, hf_model=model, dtype=torch.float64)
    logits, cache = raw.run_with_cache(tokens)
    # transformers' softmax is a float32 one
    assert float((logits - plain.logits).abs().max() / logits.abs().max()) < 1e-6
    for layer in range(raw.cfg.n_layers):
        stream = cache["resid_pre", layer]
        assert stream.dtype == torch.float64
        assert float((stream - plain.hidden_states[layer]).abs().max() / stream.abs().max()) < 1e-6
    loaded = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")
    assert float((logits - loaded(tokens).logits).abs().max() / logits.abs().max()) < 1e-5
