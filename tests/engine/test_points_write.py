"""What is written at a point is what everything after it is computed from, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from tests.engine import tiny
from tests.engine.textbook import Textbook

TOLERANCE = 4e-5  # float32, of the largest magnitude
LAYER = 1  # one with a layer before it and a layer after it


def writable(engine: EagerEngine) -> list[Address]:
    return [address for address in tiny.addresses(engine) if address.layer in (None, LAYER)]


def changed(address: Address, d_vocab: int) -> Callable[[Tensor], Tensor]:
    """A change whose size and direction differ at every entry; masked scores stay masked."""

    def change(x: Tensor) -> Tensor:
        if address.point == "tokens":
            return (x + 7) % d_vocab
        noise = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(3))
        return x * (1 + 0.3 * noise.sigmoid()) + (0.2 * noise if address.point not in ("attn_probs",) else 0)

    return change


def in_place(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    def edit(x: Tensor) -> None:
        x.copy_(change(x))

    return edit


def through_data(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
    """An edit that leaves a tensor's version as it was."""

    def edit(x: Tensor) -> None:
        x.data.copy_(change(x))

    return edit


def test_every_later_point_follows_from_an_edit_as_in_the_textbook(engine: EagerEngine, book: Textbook) -> None:
    d_vocab = engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab)
    readers = [a for a in tiny.addresses(engine, tiny.BRANCHES) if a.layer in (None, LAYER, LAYER + 1)]
    off = {}
    for address in writable(engine):
        change = changed(address, d_vocab)
        with torch.no_grad():
            expected = book(batch.tokens, batch.mask, {address: change})
        seen = tiny.read(engine, batch, [*readers, address], [Tap(address, change)])
        for reader in dict.fromkeys([*readers, address]):
            error = _error_at_real_positions(reader, batch, seen[reader], expected[reader])
            if error > TOLERANCE:
                off[f"{reader} after {address} was written"] = error
    assert off == {}


def _error_at_real_positions(address: Address, batch: Batch, got: Tensor, expected: Tensor) -> float:
    if batch.mask is not None and address.point != "tokens":
        if address.point in ("attn_scores", "attn_probs"):
            got, expected = got.transpose(1, 2), expected.transpose(1, 2)
        if got.shape[:2] == batch.mask.shape:
            got, expected = got[batch.mask.bool()], expected[batch.mask.bool()]
    return tiny.worst(got, expected)


@pytest.mark.parametrize("grad", [False, True])
def test_an_edit_in_place_does_what_a_replacement_does(engine: EagerEngine, grad: bool) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, length=8))
    given = batch.tokens.clone()
    plain, wrong = engine.run(batch, ()), []
    for address in writable(engine):
        change = changed(address, engine.facts.d_vocab)
        replaced = engine.run(batch, [Tap(address, change)], grad=grad)
        edited = engine.run(batch, [Tap(address, in_place(change))], grad=grad)
        if not torch.equal(replaced, edited) or tiny.worst(replaced, plain) < 1e-4:
            wrong.append(str(address))
        if grad:
            edited.sum().backward()  # what autograd saved was left alone
    assert wrong == [] and torch.equal(batch.tokens, given)


@pytest.mark.parametrize("name", tiny.FEW)
def test_an_edit_through_data_does_what_a_replacement_does(name: str, engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab, n=1))
    for address in writable(engine):
        change = changed(address, engine.facts.d_vocab)
        replaced, edited = (engine.run(batch, [Tap(address, fn)]) for fn in (change, through_data(change)))
        assert torch.equal(replaced, edited), address


@pytest.mark.parametrize("grad", [False, True])
def test_a_write_that_changes_nothing_changes_nothing(engine: EagerEngine, grad: bool) -> None:
    batch = tiny.left_padded(engine.facts.d_vocab)
    real, plain = batch.mask.bool(), engine.run(batch, ())
    off = {}
    for address in writable(engine):
        same = engine.run(batch, [Tap(address, lambda x: x.clone())], grad=grad)
        off[str(address)] = tiny.worst(same[real], plain[real])
    assert {address: error for address, error in off.items() if error > 2e-6} == {}


def test_a_tap_that_reads_leaves_the_bits_of_the_logits_alone(engine: EagerEngine) -> None:
    batch, inside = Batch(tiny.prompts(engine.facts.d_vocab)), ("q_rot", "k_rot", "attn_scores", "attn_probs")
    plain = engine.run(batch, ())
    seen: list[Tensor] = []
    taps = [Tap(address, seen.append, reads=True) for address in tiny.addresses(engine, leave_out=inside)]
    assert torch.equal(engine.run(batch, taps), plain) and len(seen) == len(taps)


def test_a_norm_runs_for_q_k_and_v_in_turn_and_an_edit_reaches_only_its_branch(
    engine: EagerEngine, book: Textbook
) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    at = [Address(point, LAYER) for point in ("q", "k", "value")]
    plain = tiny.read(engine, batch, at)
    for point in ("attn_norm_scale", "attn_norm_normalized"):
        for turn in range(3):
            calls: list[int] = []

            def scale_one_turn(x: Tensor, turn: int = turn, calls: list[int] = calls) -> Tensor:
                calls.append(1)
                return x * 1.5 if len(calls) == turn + 1 else x

            seen = tiny.read(engine, batch, at, [Tap(Address(point, LAYER), scale_one_turn)])
            moved = [tiny.worst(seen[a], plain[a]) > 1e-3 for a in at]
            same = [torch.equal(seen[a], plain[a]) or tiny.worst(seen[a], plain[a]) < 2e-6 for a in at]
            assert len(calls) == 3
            assert moved == [i == turn for i in range(3)] and same == [i != turn for i in range(3)]


BRANCH_ONLY = {
    "attn_stream_in": "attn_out",
    "q_input": "q",
    "k_input": "k",
    "v_input": "value",
    "attn_norm_scale": "attn_out",
    "attn_norm_normalized": "attn_out",
    "attn_in": "attn_out",
    "mlp_stream_in": "mlp_in",
    "mlp_norm_scale": "mlp_in",
    "mlp_norm_normalized": "mlp_in",
    "mlp_in": "mlp_out",
}


def test_an_edit_of_a_branch_leaves_the_stream_beside_it_alone(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    skip = {"attn": "resid_pre", "mlp": "resid_pre" if engine.facts.parallel else "resid_mid"}
    for point, moves in BRANCH_ONLY.items():
        address = Address(point, LAYER)
        if engine.refuses(address, "write"):
            continue
        branch = "mlp" if point.startswith("mlp") else "attn"
        at = [
            Address(p, LAYER) for p in ("resid_pre", skip[branch], moves, "attn_out_post", "mlp_out_post", "resid_post")
        ]
        plain = tiny.read(engine, batch, at)
        seen = tiny.read(engine, batch, at, [Tap(address, lambda x: x * torch.linspace(2, 1, x.shape[-1]))])
        assert torch.equal(seen[at[0]], plain[at[0]]), address
        assert torch.equal(seen[at[1]], plain[at[1]]) or tiny.worst(seen[at[1]], plain[at[1]]) < 2e-6, address
        assert tiny.worst(seen[at[2]], plain[at[2]]) > 1e-3, address
        stream = seen[at[0]] + seen[at[3]] + seen[at[4]]
        assert tiny.worst(seen[at[5]], stream) < TOLERANCE, address


def test_each_tap_at_an_address_sees_the_last_ones_result(engine: EagerEngine) -> None:
    for address in writable(engine):
        if address.point in ("tokens", "attn_norm_scale", "attn_norm_normalized"):
            continue
        seen: list[Tensor] = []
        see = Tap(address, lambda x, seen=seen: seen.append(x.clone()), reads=True)
        taps = [see, Tap(address, lambda x: x * 2), Tap(address, _triple), see]
        engine.run(Batch(torch.tensor([[1, 2, 3]])), taps)
        assert len(seen) == 2 and tiny.worst(seen[1], seen[0] * 6) < 2e-6, address


def _triple(x: Tensor) -> None:
    x.mul_(3)


def test_two_edits_on_one_branch_both_count(engine: EagerEngine, book: Textbook) -> None:
    """An edit of the stream that all three read is there for the copy that queries read, and for the norm after it."""
    batch, d_vocab = Batch(tiny.prompts(engine.facts.d_vocab)), engine.facts.d_vocab
    points = ("attn_stream_in", "q_input", "attn_norm_normalized", "q", "z", "attn_result", "resid_mid")
    edited = [a for point in points if engine.refuses(a := Address(point, LAYER), "write") is None]
    edits = {address: changed(address, d_vocab) for address in edited}
    with torch.no_grad():
        expected = book(batch.tokens, None, edits)
    at = [*edited, Address("logits")]
    seen = tiny.read(engine, batch, at, [Tap(address, change) for address, change in edits.items()])
    assert {str(a): e for a in at if (e := tiny.worst(seen[a], expected[a])) > TOLERANCE} == {}


def test_embeddings_given_in_place_of_tokens_are_a_point_too(engine: EagerEngine) -> None:
    tokens = tiny.prompts(engine.facts.d_vocab)
    embeds = tiny.read(engine, Batch(tokens), [Address("embeddings")])[Address("embeddings")]
    kept = embeds.clone()
    assert torch.equal(engine.run(Batch(None, embeds=embeds), ()), engine.run(Batch(tokens), ()))
    for fn in (lambda x: x * 2, _double):
        edited = engine.run(Batch(None, embeds=embeds), [Tap(Address("embeddings"), fn)])
        assert torch.equal(edited, engine.run(Batch(tokens), [Tap(Address("embeddings"), lambda x: x * 2)]))
    assert torch.equal(embeds, kept)


def _double(x: Tensor) -> None:
    x.mul_(2)


def test_an_edit_of_keys_and_values_enters_the_cache_and_one_of_rotated_keys_does_not(engine: EagerEngine) -> None:
    prompt, after = Batch(tiny.prompts(engine.facts.d_vocab, n=1)), Batch(torch.tensor([[3]]))

    def next_keys(point: str | None) -> Tensor:
        cache = engine.new_cache()
        engine.run(prompt, [] if point is None else [Tap(Address(point, LAYER), _double)], cache=cache)
        return tiny.read(engine, after, [Address("k_rot", LAYER)], cache=cache)[Address("k_rot", LAYER)]

    plain = next_keys(None)
    assert torch.equal(next_keys("k_rot"), plain)
    assert not torch.equal(next_keys("k_norm_out" if engine.facts.qk_norm else "k")[:, :-1], plain[:, :-1])


WHOLE_STATE = ("tokens", "embeddings", "resid_pre", "resid_mid", "resid_post", "final_norm", "lm_head", "logits")


def test_what_carries_the_whole_state_carries_the_other_prompt_with_it(engine: EagerEngine) -> None:
    """Activation patching, the whole of it: the stream of one prompt put into the run of another gives its logits."""
    clean, corrupted = (Batch(tiny.prompts(engine.facts.d_vocab, seed=seed)) for seed in (0, 1))
    at = [a for a in tiny.addresses(engine) if a.point in WHOLE_STATE]
    seen, target = tiny.read(engine, clean, at), engine.run(clean, ())
    for address in at:
        patched = engine.run(corrupted, [Tap(address, lambda x, a=address: seen[a])])
        assert tiny.worst(patched, target) < 4e-6, address
