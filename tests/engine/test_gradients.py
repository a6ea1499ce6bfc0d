"""The gradient of the tensor that a tap was handed, against autograd through the textbook and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from tests.engine import tiny
from tests.engine.textbook import Textbook

TOLERANCE = 1e-4  # float32, of a gradient's largest magnitude
NORM_PARTS = ("attn_norm_scale", "attn_norm_normalized")
# What q, k and v read is handed out either as one tensor for all three or as three: one group is asked for at a time.
GROUPS = {
    "the stream": (),
    "the norm of each branch": NORM_PARTS,
    "the input of each branch": (*tiny.BRANCHES, *NORM_PARTS),
}


def differentiable(engine: EagerEngine, group: tuple[str, ...]) -> list[Address]:
    """The addresses of one group, or those that are in none."""
    every = [a for a in tiny.addresses(engine) if engine.refuses(a, "grad") is None]
    if group:
        return [a for a in every if a.point in group]
    return [a for a in every if a.point not in (*tiny.BRANCHES, *NORM_PARTS)]


def weighted_sum(logits: Tensor, mask: Tensor | None) -> Tensor:
    """A scalar to which every logit at a real position contributes differently."""
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits)
    return (logits * noise * (1 if mask is None else mask[..., None])).sum()


def engine_gradients(engine: EagerEngine, batch: Batch, at: list[Address]) -> dict[Address, Tensor]:
    handed: dict[Address, Tensor] = {}
    logits = engine.run(batch, [Tap(a, lambda x, a=a: handed.__setitem__(a, x)) for a in at], grad=True)
    return dict(zip(at, torch.autograd.grad(weighted_sum(logits, batch.mask), [handed[a] for a in at])))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_the_gradient_at_every_point_is_the_textbooks(
    engine: EagerEngine, book: Textbook, group: str, padded: bool
) -> None:
    d_vocab = engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab) if padded else Batch(tiny.prompts(d_vocab))
    at = differentiable(engine, GROUPS[group])
    branches = [a for a in at if a.point in (*tiny.BRANCHES, "attn_in")]
    seen = book(batch.tokens, batch.mask, {a: lambda x: x * 1 for a in branches})
    expected = torch.autograd.grad(weighted_sum(seen[Address("logits")], batch.mask), [seen[a] for a in at])
    got = engine_gradients(engine, batch, at)
    off = {str(a): tiny.worst(got[a].nan_to_num(), want.nan_to_num()) for a, want in zip(at, expected)}
    assert {address: error for address, error in off.items() if error > TOLERANCE} == {}


@pytest.mark.parametrize("name", tiny.FEW)
def test_the_gradient_is_what_finite_differences_say(name: str) -> None:
    """An independent route, in float64: one random direction at each point of one layer."""
    engine, layer = tiny.new_engine(name, torch.float64), 1
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=8))
    off = {}
    for group in GROUPS.values():
        for address in [a for a in differentiable(engine, group) if a.layer in (None, layer)]:
            gradient = engine_gradients(engine, batch, [address])[address]
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            last_of = 3 if address.point in NORM_PARTS else 1  # the gradient is that of the last tensor handed out
            calls = [0]

            def nudged(step: float) -> Tensor:
                calls[0] = 0

                def nudge(x: Tensor) -> Tensor:
                    calls[0] += 1
                    return x + step * noise if calls[0] == last_of else x

                return weighted_sum(engine.run(batch, [Tap(address, nudge)]), None)

            step = 1e-3 if engine.facts.norm == "rms" else 1e-5  # RMS norms compute in float32 whatever they are given
            difference = float(nudged(step) - nudged(-step)) / (2 * step)
            directional = float((gradient * noise).sum())
            scale = float(gradient.norm() * noise.norm() / noise.numel() ** 0.5)
            off[str(address)] = abs(difference - directional) / scale
    assert {address: error for address, error in off.items() if error > 2e-3} == {}


@pytest.mark.parametrize("name", tiny.FEW)
def test_a_gradient_flows_through_what_a_tap_put_in(engine: EagerEngine, book: Textbook) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    off = {}
    for address in [a for group in GROUPS.values() for a in differentiable(engine, group) if a.layer in (None, 1)]:
        grads = []
        for run in (
            lambda fn: engine.run(batch, [Tap(address, fn)], grad=True),
            lambda fn: book(batch.tokens, None, {address: fn})[Address("logits")],
        ):
            strength = torch.tensor(1.3, requires_grad=True)
            logits = run(lambda x: x * strength)
            grads.append(torch.autograd.grad(weighted_sum(logits, None), strength)[0])
        off[str(address)] = float((grads[0] - grads[1]).abs() / grads[1].abs().clamp(min=1.0))
    assert {address: error for address, error in off.items() if error > 1e-3} == {}


def test_without_grad_nothing_is_recorded_and_with_it_parameters_get_theirs(
    engine: EagerEngine, reference: torch.nn.Module
) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    assert not engine.run(batch, ()).requires_grad
    try:
        weighted_sum(engine.run(batch, (), grad=True), None).backward()
        weighted_sum(reference(batch.tokens).logits, None).backward()
        ours, theirs = engine.tree.embed.weight.grad, reference.get_input_embeddings().weight.grad
        assert tiny.worst(ours, theirs) < 1e-6
    finally:
        engine.model.zero_grad()
        reference.zero_grad()


def test_given_embeddings_that_are_a_leaf_get_their_gradient_and_may_be_edited_in_place(engine: EagerEngine) -> None:
    embeds = torch.randn(1, 4, engine.facts.d_model, generator=torch.Generator().manual_seed(1)).requires_grad_()
    kept = embeds.detach().clone()

    def halve(x: Tensor) -> None:
        x.mul_(0.5)

    weighted_sum(
        engine.run(Batch(None, embeds=embeds), [Tap(Address("embeddings"), halve)], grad=True), None
    ).backward()
    assert embeds.grad is not None and embeds.grad.abs().sum() > 0 and torch.equal(embeds.detach(), kept)
