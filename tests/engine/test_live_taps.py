"""Taps that are added while the forward runs, and model calls from inside a tap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.errors import CompatError, Refused
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap, Taps
from tests.engine import tiny

# Several calls at one address (the norm of q, k and v) make "ahead" depend on which call it is.
THRICE = ("attn_norm_scale", "attn_norm_normalized")


def in_order(engine: EagerEngine, batch: Batch) -> list[Address]:
    """The addresses in the order in which this engine's forward meets them."""
    order: list[Address] = []
    leave_out = (*tiny.BRANCHES, *THRICE)
    engine.run(batch, [Tap(a, lambda x, a=a: order.append(a), reads=True) for a in tiny.addresses(engine, leave_out)])
    return order


def adding(taps: Taps, at: Address, new: Tap) -> Tap:
    """A tap that adds another when the forward gets to `at`."""
    added: list[Tap] = []

    def add(x: Tensor) -> None:
        if not added:
            added.append(new)
            taps.add(new)

    return Tap(at, add, reads=True)


def run_adding(engine: EagerEngine, batch: Batch, at: Address, address: Address, fn: Callable, reads: bool) -> Tensor:
    taps = Taps()
    taps.add(adding(taps, at, Tap(address, fn, reads)))
    return engine.run(batch, taps)


def test_a_tap_added_at_any_point_fires_at_every_point_ahead(engine: EagerEngine) -> None:
    """From each point of one layer to each later one there and a few beyond; modules that are running included."""
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=3))
    order = in_order(engine, batch)
    layer = [a for a in order if a.layer == 1]
    beyond = [
        a
        for a in order
        if a in (Address("q_rot", 2), Address("resid_post", 2), Address("final_norm"), Address("logits"))
    ]
    lost = []
    for i, at in enumerate(layer):
        taps, seen = Taps(), []
        ahead = layer[i + 1 :] + beyond
        taps.add(
            Tap(
                at,
                lambda x: [taps.add(Tap(a, lambda y, a=a: seen.append(a), reads=True)) for a in ahead] and None,
                reads=True,
            )
        )
        engine.run(batch, taps)
        lost += [f"{a} added at {at}" for a in ahead if a not in seen]
    assert lost == []


def test_each_point_alone_can_be_added_from_the_start_of_its_layer(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=3))
    for address in [a for a in tiny.addresses(engine) if a.layer == 1 and a.point != "resid_pre"]:
        seen: list[Tensor] = []
        run_adding(engine, batch, Address("resid_pre", 1), address, seen.append, reads=True)
        assert len(seen) == 1, address


def test_an_edit_that_is_added_late_counts_as_one_that_was_there_before(engine: EagerEngine) -> None:
    """Added one point ahead, by a tap that only reads: nothing tells the forward in advance that an edit will come."""
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5))
    order = [a for a in in_order(engine, batch) if a.layer in (None, 1)]
    for at, address in zip(order, order[1:]):
        double = (lambda x: x * 2) if address.point != "tokens" else (lambda x: x + 1)
        expected = engine.run(batch, [Tap(address, double)])
        got = run_adding(engine, batch, at, address, double, reads=False)
        assert torch.equal(got, expected) or tiny.worst(got, expected) < 4e-6, f"{address} added at {at}"


def test_an_edit_of_one_branch_that_is_added_late_counts(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5))
    for at, address in (
        ("q_input", "k_input"),
        ("q_input", "v_input"),
        ("resid_pre", "q_input"),
        ("resid_pre", "mlp_stream_in"),
    ):
        at, address = Address(at, 1), Address(address, 1)
        expected = engine.run(batch, [Tap(address, lambda x: x * torch.linspace(1, 2, x.shape[-1]))])
        got = run_adding(engine, batch, at, address, lambda x: x * torch.linspace(1, 2, x.shape[-1]), reads=False)
        assert tiny.worst(got, expected) < 4e-6, f"{address} added at {at}"


def test_a_tap_for_a_point_that_was_passed_raises_at_the_end(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=3))
    for at, passed in (
        (Address("attn_out", 1), Address("q", 1)),
        (Address("resid_pre", 2), Address("resid_post", 0)),
        (Address("logits"), Address("embeddings")),
        (Address("attn_probs", 0), Address("attn_scores", 0)),
        (Address("z", 1), Address("z", 1)),  # where it is now has been passed, too
    ):
        with pytest.raises(CompatError, match=f"{passed} never fired".replace(".", r"\.")):
            run_adding(engine, batch, at, passed, lambda x: None, reads=True)


def test_a_late_tap_at_a_passed_point_is_missed_also_where_another_had_fired(engine: EagerEngine) -> None:
    batch, taps = Batch(torch.tensor([[1, 2, 3]])), Taps()
    taps.add(Tap(Address("resid_pre", 0), lambda x: None))
    taps.add(adding(taps, Address("resid_post", 0), Tap(Address("resid_pre", 0), lambda x: x * 0)))
    with pytest.raises(CompatError, match=r"resid_pre\.0 never fired"):
        engine.run(batch, taps)


def test_a_tap_added_for_a_point_that_the_family_lacks_is_refused(name: str, engine: EagerEngine) -> None:
    lacks = {"gpt2": "q_norm_in", "EleutherAI/pythia-70m": "resid_mid", "gemma-3": "attn_stream_in"}
    address = Address(lacks.get(name, "pos_embed"), 1 if name in lacks else None)
    with pytest.raises(Refused, match=f"{address} cannot be served".replace(".", r"\.")):
        run_adding(engine, Batch(torch.tensor([[1, 2, 3]])), Address("resid_pre", 0), address, lambda x: x, reads=False)
    with pytest.raises(Refused, match="layers 0 to"):
        run_adding(
            engine,
            Batch(torch.tensor([[1, 2]])),
            Address("resid_pre", 0),
            Address("resid_pre", 77),
            lambda x: x,
            reads=False,
        )


def test_the_same_taps_can_serve_two_runs(engine: EagerEngine) -> None:
    seen: list[Tensor] = []
    taps = Taps([Tap(Address("resid_post", 1), seen.append, reads=True)])
    engine.run(Batch(torch.tensor([[1, 2]])), taps)
    engine.run(Batch(torch.tensor([[1, 2, 3]])), taps)
    assert [x.shape[1] for x in seen] == [2, 3]


@pytest.mark.parametrize(
    "point", ["tokens", "resid_pre", "q", "attn_scores", "attn_result", "mlp_act", "lm_head", "logits"]
)
def test_a_run_inside_a_tap_fires_its_own_taps_only(engine: EagerEngine, point: str) -> None:
    batch, other = (Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5, seed=seed)) for seed in (0, 1))
    plain, inner_plain = engine.run(batch, ()), engine.run(other, ())
    address = Address(point, None if point in ("tokens", "lm_head", "logits") else 1)
    outer_calls, inner_seen, inner_logits = [], [], []

    def call_the_model(x: Tensor) -> None:
        outer_calls.append(1)
        inner_logits.append(engine.run(other, [Tap(Address("resid_post", 1), inner_seen.append, reads=True)]))

    watch = Tap(Address("resid_post", 2), lambda x: outer_calls.append(2), reads=True)
    outer = engine.run(batch, [Tap(address, call_the_model), watch])
    assert outer_calls == ([2, 1] if point in ("lm_head", "logits") else [1, 2]) and len(inner_seen) == 1
    assert tiny.worst(outer, plain) < 2e-6 and torch.equal(inner_logits[0], inner_plain)


def test_a_raw_call_of_the_model_inside_a_tap_fires_nothing(engine: EagerEngine, reference: Any) -> None:
    batch, other = (Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5, seed=seed)) for seed in (0, 1))
    with torch.no_grad():
        expected = reference(other.tokens).logits
    calls, inner = [], []

    def call_the_model(x: Tensor) -> None:
        calls.append(1)
        inner.append(engine.model(input_ids=other.tokens).logits)

    at = [Address("resid_pre", 1), Address("attn_probs", 0), Address("mlp_act", 2)]
    engine.run(batch, [Tap(address, call_the_model) for address in at])
    assert len(calls) == 3 and all(torch.equal(logits, expected) for logits in inner)


def test_a_run_inside_a_piece_is_the_whole_model(engine: EagerEngine) -> None:
    """The layers that the outer run passes by are there for the inner one and for a raw call."""
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5))
    plain, inner = engine.run(batch, ()), []
    resid = tiny.read(engine, batch, [Address("resid_pre", 2)])[Address("resid_pre", 2)]

    def call_the_model(x: Tensor) -> None:
        inner.append(engine.run(batch, ()))
        inner.append(engine.model(input_ids=batch.tokens).logits)
        inner.append(engine.run(batch, (), start=(1, engine.run(batch, (), stop=1))))

    outer = engine.run(batch, [Tap(Address("resid_pre", 2), call_the_model)], start=(2, resid))
    assert all(torch.equal(logits, plain) for logits in (*inner, outer)) and len(inner) == 3


def test_the_same_tap_may_run_a_model_that_runs_a_model(engine: EagerEngine) -> None:
    batch, depth = Batch(torch.tensor([[1, 2, 3]])), []

    def deeper(x: Tensor) -> None:
        depth.append(1)
        if len(depth) < 4:
            engine.run(batch, [Tap(Address("attn_out", 1), deeper)])

    plain = engine.run(batch, ())
    assert torch.equal(engine.run(batch, [Tap(Address("attn_out", 1), deeper)]), plain) and len(depth) == 4
