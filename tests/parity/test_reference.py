"""The yardstick itself: the real TransformerLens and Hugging Face agree on every tiny model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.real_models import GEMMA3, SMOLLM2
from tests.hub import FAMILIES, NAMES, ensure_real
from tests.reference import reference_model, reference_model_no_processing

TOLERANCE = 1e-4  # of the largest logit
REAL_NAMES = (SMOLLM2, GEMMA3)
REAL = [pytest.param(name, marks=pytest.mark.slow) for name in REAL_NAMES]
PROMPT = "When Mary and John went to the store, John gave a drink to Mary. Hello world!"


def hf_logits(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids `[1, pos]`, logits `[1, pos, d_vocab]`) of the raw model, beginning with BOS where it has one."""
    ids = AutoTokenizer.from_pretrained(name)(PROMPT, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager")
    with torch.no_grad():
        return ids, model(ids).logits


@pytest.mark.parametrize("name", NAMES)
def test_unprocessed_reference_computes_the_checkpoints_logits(name: str) -> None:
    ids, expected = hf_logits(name)
    with torch.no_grad():
        found = reference_model_no_processing(name)(ids)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("name", [*NAMES, *REAL])
def test_processed_reference_computes_the_checkpoints_logits_centred(name: str) -> None:
    if name in REAL_NAMES:
        ensure_real(name)
    ids, expected = hf_logits(name)
    model = reference_model(name)
    if model.cfg.output_logits_soft_cap <= 0:
        expected = expected - expected.mean(-1, keepdim=True)
    with torch.no_grad():
        found = model(ids)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_reference_tokenizes_a_prompt_as_the_checkpoints_tokenizer_does(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    bare = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model = reference_model(name)
    assert model.to_tokens(PROMPT, prepend_bos=False).tolist() == [bare]
    assert model.to_tokens(PROMPT, prepend_bos=True).tolist() == [[bos, *bare]]
    assert model.to_string(torch.tensor(bare)) == PROMPT


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_of_a_tiny_model_is_left_at_its_initial_value(name: str) -> None:
    for parameter_name, parameter in AutoModelForCausalLM.from_pretrained(name).named_parameters():
        assert parameter.std() > 0.05, parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_a_tiny_model_do_not_coincide(name: str) -> None:
    cfg = reference_model(name).cfg
    family = next(family for family in FAMILIES if family.name == name)
    sizes = [cfg.d_mlp, cfg.d_model, cfg.d_vocab, family.config.get("n_positions") or cfg.n_ctx, cfg.d_head]
    if name not in ("gpt2", "EleutherAI/pythia-70m"):  # whose heads always fill d_model
        sizes.append(cfg.n_heads * cfg.d_head)
    assert len(set(sizes)) == len(sizes)
