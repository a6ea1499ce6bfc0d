"""The textbook decoder is right: Hugging Face, untouched, gives its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.points import Address
from tests.engine import tiny
from tests.engine.textbook import Textbook

TOLERANCE = 2e-5  # float32, of the largest magnitude


@pytest.mark.parametrize("padded", [False, True])
def test_the_textbook_gives_hugging_faces_hidden_states_attentions_and_logits(
    name: str, book: Textbook, padded: bool
) -> None:
    reference = tiny.hf_model(name, attn_implementation="eager")  # the one that shows its attentions
    d_vocab = reference.config.vocab_size
    batch = tiny.left_padded(d_vocab) if padded else tiny.Batch(tiny.prompts(d_vocab))
    seen, out = _both(book, reference, batch)
    real = slice(None) if batch.mask is None else batch.mask.bool()
    n_layers = reference.config.num_hidden_layers
    pairs = [(seen[Address("logits")], out.logits), (seen[Address("final_norm")], out.hidden_states[-1])]
    pairs += [(seen[Address("resid_pre", layer)], out.hidden_states[layer]) for layer in range(n_layers)]
    pairs += [
        (seen[Address("attn_probs", layer)].transpose(1, 2), out.attentions[layer].transpose(1, 2))
        for layer in range(n_layers)
    ]
    assert max(tiny.worst(got[real], expected[real]) for got, expected in pairs) < TOLERANCE


@torch.no_grad()
def _both(book: Textbook, reference: Any, batch: tiny.Batch) -> tuple[dict, Any]:
    more = {} if batch.mask is None else {"attention_mask": batch.mask, "position_ids": tiny.positions(batch.mask)}
    out = reference(batch.tokens, **more, output_hidden_states=True, output_attentions=True)
    return book(batch.tokens, batch.mask), out
