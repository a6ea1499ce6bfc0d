"""Every point of every family is read where the textbook has it; what a family lacks is refused with a true reason."""

from __future__ import annotations

import pytest
import torch

from engine.eager.engine import EagerEngine
from engine.errors import Refused, UnknownName
from engine.points import POINTS, Address
from engine.seam import Batch
from engine.taps import Tap
from tests.engine import tiny
from tests.engine.textbook import Textbook

TOLERANCE = 2e-5  # float32, of the largest magnitude


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("leave_out", [(), tiny.BRANCHES])
def test_every_point_holds_the_textbooks_value(
    engine: EagerEngine, book: Textbook, padded: bool, leave_out: tuple[str, ...]
) -> None:
    batch = tiny.left_padded(engine.facts.d_vocab) if padded else Batch(tiny.prompts(engine.facts.d_vocab))
    at = tiny.addresses(engine, leave_out)
    with torch.no_grad():
        expected = book(batch.tokens, batch.mask)
    seen = tiny.read(engine, batch, at)
    off = {}
    for address in at:
        want = expected[address]
        if not leave_out and address.point.startswith("attn_norm_"):  # with the branches tapped it has a head axis
            want = want[:, :, None].expand(-1, -1, seen[address].shape[2], -1)
        off[address] = tiny.worst(*_at_real_positions(address, batch, seen[address], want))
    assert {str(a): error for a, error in off.items() if error > TOLERANCE} == {}
    assert {a for a in expected if a.point not in leave_out} == set(at)


def _at_real_positions(address: Address, batch: Batch, *values: torch.Tensor) -> list[torch.Tensor]:
    """Hugging Face's implementations agree on nothing at padding, so neither is anything promised there."""
    if batch.mask is None or address.point == "tokens":
        return list(values)
    real = batch.mask.bool()
    by_position = (x.transpose(1, 2) if address.point in ("attn_scores", "attn_probs") else x for x in values)
    return [x[real] for x in by_position]


def test_every_point_has_the_shape_that_its_row_says(engine: EagerEngine) -> None:
    facts, batch = engine.facts, Batch(tiny.prompts(engine.facts.d_vocab, n=2, length=9))
    sizes = dict(b=2, p=9, q=9, k=9, D=facts.d_model, H=facts.n_heads, K=facts.n_kv_heads, dh=facts.d_head)
    sizes |= dict(M=facts.d_mlp, V=facts.d_vocab) | {"1": 1}
    for group in (tiny.BRANCHES, tuple(set(POINTS) - set(tiny.BRANCHES))):
        for address, value in tiny.read(engine, batch, tiny.addresses(engine, leave_out=group)).items():
            row = POINTS[address.point]
            assert list(value.shape) == [sizes[axis] for axis in row.shape.split()], str(address)


def test_the_sizes_of_a_tiny_model_tell_its_axes_apart(engine: EagerEngine) -> None:
    facts = engine.facts
    sizes = [facts.d_mlp, facts.d_model, facts.d_vocab, facts.n_ctx, facts.d_head, facts.n_heads]
    assert len(set(sizes)) == len(sizes)


LACKS = {
    "gpt2": {"q_norm_in", "k_norm_out", "attn_post_norm_scale", "mlp_post_norm_scale", "mlp_pre_linear"},
    "EleutherAI/pythia-70m": {"pos_embed", "resid_mid", "q_norm_scale", "mlp_pre_linear", "attn_post_norm_normalized"},
    "meta-llama/Llama-3.2-1B": {"pos_embed", "attn_stream_in", "k_norm_normalized", "mlp_post_norm_normalized"},
    "Qwen/Qwen3-0.6B": {"pos_embed", "attn_stream_in", "attn_post_norm_scale"},
    tiny.GEMMA_2: {"pos_embed", "attn_stream_in", "q_norm_out"},
    "gemma-3": {"pos_embed", "attn_stream_in"},
    "phi-3": {"pos_embed", "attn_stream_in", "q_norm_in", "mlp_post_norm_scale"},
    "llama with biases": {"pos_embed", "q_norm_in", "attn_post_norm_scale"},
}
REASONS = {
    "pos_embed": "its positions are rotary",
    "resid_mid": "in parallel",
    "attn_stream_in": "use q_input, k_input, v_input",
    "q_norm": "no norm on queries and keys",
    "k_norm": "no norm on queries and keys",
    "attn_post_norm": "no norm after attention",
    "mlp_post_norm": "no norm after the MLP",
    "mlp_pre_linear": "not gated",
}


def test_a_point_that_the_family_lacks_is_refused_with_the_reason(name: str, engine: EagerEngine) -> None:
    for point in LACKS[name]:
        reason = next(sentence for prefix, sentence in REASONS.items() if point.startswith(prefix))
        address = Address(point, 0 if POINTS[point].layered else None)
        with pytest.raises(Refused, match=reason):
            engine.run(Batch(torch.tensor([[1, 2]])), [Tap(address, lambda x: None)])


def test_refuses_says_what_run_does(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=3))
    for point in POINTS.values():
        for layer in (1, engine.facts.n_layers) if point.layered else (None,):
            address, called = Address(point.name, layer), []
            reason = engine.refuses(address, "read")
            try:
                engine.run(batch, [Tap(address, lambda x: called.append(1))])
            except Refused as error:
                assert reason is not None and reason in str(error) and str(address) in str(error)
            else:
                assert reason is None and called


def test_only_token_ids_have_no_gradient(engine: EagerEngine) -> None:
    without = {str(a) for a in tiny.addresses(engine) if engine.refuses(a, "grad") is not None}
    assert without == {"tokens"}


def test_an_address_names_its_layer_where_the_point_has_one() -> None:
    assert Address.parse("resid_post.10") == Address("resid_post", 10)
    assert str(Address("logits")) == "logits" and Address.parse("logits") == Address("logits")
    with pytest.raises(UnknownName, match=r"resid_post\.0"):
        Address("resid_post")
    with pytest.raises(UnknownName, match="has no layer"):
        Address("logits", 3)
    with pytest.raises(UnknownName, match="'resid_post', 'resid_pre'"):
        Address("resid_pos", 1)


def test_weights_are_those_that_the_points_follow_from(engine: EagerEngine) -> None:
    """Each canonical weight, in its layout, maps a point that was read to the next one."""
    facts, w = engine.facts, engine.weights
    batch = Batch(tiny.prompts(facts.d_vocab))
    seen = {str(a): x for a, x in tiny.read(engine, batch, tiny.addresses(engine, tiny.BRANCHES)).items()}
    pairs = [
        (w("embed")[batch.tokens], "embeddings"),
        (seen["final_norm"] @ w("unembed") + w("unembed_bias"), "lm_head"),
    ]
    for layer in range(facts.n_layers):
        for part, point in (("q", "q"), ("k", "k"), ("v", "value")):
            out = torch.einsum("bpd,hdk->bphk", seen[f"attn_in.{layer}"], w(part, layer)) + w(f"{part}_bias", layer)
            pairs.append((out, f"{point}.{layer}"))
        out = torch.einsum("bphd,hdm->bpm", seen[f"z.{layer}"], w("o", layer)) + w("o_bias", layer)
        pairs.append((out, f"attn_out.{layer}"))
        ups = (("mlp_gate", "mlp_pre"), ("mlp_in", "mlp_pre_linear")) if facts.gated_mlp else (("mlp_in", "mlp_pre"),)
        for weight, point in ups:
            pairs.append((seen[f"mlp_in.{layer}"] @ w(weight, layer) + w(f"{weight}_bias", layer), f"{point}.{layer}"))
        pairs.append((seen[f"mlp_act.{layer}"] @ w("mlp_out", layer) + w("mlp_out_bias", layer), f"mlp_out.{layer}"))
    assert {point: e for got, point in pairs if (e := tiny.worst(got, seen[point])) > TOLERANCE} == {}
