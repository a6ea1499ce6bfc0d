"""Every family that the table of roles resolves: its points are proved at load, and an edit, padding and a cache are right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from engine.eager.engine import EagerEngine
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from tests.engine import tiny
from tests.engine.families import FAMILIES, STATEFUL, UNPROVED, build

TOLERANCE = 1e-4
INDICES = ("tokens", "expert_indices")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(family: str, tiny_hub: Any) -> EagerEngine:
    return _engine(family)


@cache
def _engine(family: str) -> EagerEngine:
    return EagerEngine(build(family))


def test_every_point_is_proved_or_said_to_be_absent(family: str, engine: EagerEngine) -> None:
    assert set(engine._unproved) == UNPROVED.get(family, set())
    resid = [Address(point, layer) for point in ("resid_pre", "resid_post") for layer in range(engine.facts.n_layers)]
    assert all(engine.refuses(address, "read") is None for address in resid)


def test_a_forward_without_taps_is_the_models_own(family: str, engine: EagerEngine) -> None:
    tokens = tiny.prompts(engine.facts.d_vocab)
    with torch.no_grad():
        expected = build(family)(tokens, use_cache=False).logits
    assert tiny.worst(engine.run(Batch(tokens), ()), expected) < 1e-6


@pytest.mark.slow
def test_a_write_that_changes_nothing_changes_nothing_and_one_that_does_shows(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    plain, wrong = engine.run(batch, ()), {}
    for address in tiny.addresses(engine, (*INDICES, "logits")):
        same = engine.run(batch, [Tap(address, lambda x: x.clone())])
        if tiny.worst(same, plain) > 1e-5:
            wrong[str(address)] = "an edit of nothing changed the logits"
        edit = Tap(address, lambda x: x * torch.linspace(0.5, 1.5, x.shape[1]).view(1, -1, *[1] * (x.dim() - 2)))
        seen: list[torch.Tensor] = []
        logits = engine.run(batch, [edit, Tap(address, lambda x: seen.append(x), reads=True)])
        last = (engine.facts.n_layers - 1, None)
        if torch.equal(logits, plain) and address.layer not in last:
            wrong[str(address)] = "an edit changed nothing"
    quiet = {a for a in wrong if wrong[a] == "an edit changed nothing" and a.split(".")[0] in ("attn_scores", "router_probs")}
    assert {a: what for a, what in wrong.items() if a not in quiet} == {}


@pytest.mark.slow
def test_gradients_reach_what_a_tap_was_handed(engine: EagerEngine) -> None:
    batch, without = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5)), []
    for address in tiny.addresses(engine, (*INDICES, "logits")):
        handed: list[torch.Tensor] = []

        def keep(x: torch.Tensor) -> torch.Tensor:
            x = x * 1.0
            handed.append(x)
            return x

        logits = engine.run(batch, [Tap(address, keep)], grad=True)
        (gradient,) = torch.autograd.grad(logits[0, -1].square().sum(), handed[:1], allow_unused=True)
        if gradient is None:
            without.append(str(address))
    assert without == []


@pytest.mark.slow
def test_a_left_padded_prompt_is_the_prompt_alone(family: str, engine: EagerEngine) -> None:
    if family == "Mpt":
        pytest.skip("transformers counts MPT's position bias from the padding, so a padded prompt is another prompt there")
    batch = tiny.left_padded(engine.facts.d_vocab, (11, 4))
    at = [Address("resid_post", layer) for layer in range(engine.facts.n_layers)]
    together = tiny.read(engine, batch, at)
    alone = tiny.read(engine, Batch(batch.tokens[1:, -4:]), at)
    off = {str(a): tiny.worst(together[a][1:, -4:], alone[a]) for a in at}
    assert {address: error for address, error in off.items() if error > TOLERANCE} == {}


@pytest.mark.slow
def test_steps_with_a_cache_are_the_whole_forward(family: str, engine: EagerEngine) -> None:
    if family in STATEFUL:
        pytest.skip("its state-space layers keep a state that the engine's cache has no room for")
    tokens, cache_ = tiny.prompts(engine.facts.d_vocab), engine.new_cache()
    whole = engine.run(Batch(tokens), ())
    pieces = [engine.run(Batch(tokens[:, a:b]), (), cache=cache_) for a, b in ((0, 8), (8, 9), (9, 11))]
    assert tiny.worst(torch.cat(pieces, 1), whole) < TOLERANCE
