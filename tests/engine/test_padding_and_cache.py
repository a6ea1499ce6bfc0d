"""Padding, masks, positions, the cache, generation, and forwards that start or stop at a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.errors import BadInput
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from tests.engine import tiny

TOLERANCE = 2e-5  # float32, of the largest magnitude


def hugging_face(reference: Any, batch: Batch, **more: Any) -> Any:
    """The untouched model's output, with the positions that its own generate would give it."""
    if batch.mask is not None:
        more |= {"attention_mask": batch.mask, "position_ids": tiny.positions(batch.mask)}
    with torch.no_grad():
        return reference(batch.tokens, **more)


def alone(batch: Batch, row: int) -> tuple[Batch, int]:
    """One prompt of a left-padded batch without its padding, and how long it is."""
    length = int(batch.mask[row].sum())
    return Batch(batch.tokens[row : row + 1, -length:]), length


@pytest.mark.parametrize("padded", [False, True])
def test_an_untapped_forward_is_hugging_faces_own_bit_for_bit(
    engine: EagerEngine, reference: Any, padded: bool
) -> None:
    d_vocab = engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab) if padded else Batch(tiny.prompts(d_vocab))
    real = slice(None) if batch.mask is None else batch.mask.bool()
    assert torch.equal(engine.run(batch, ())[real], hugging_face(reference, batch).logits[real])


def test_a_left_padded_prompt_is_the_prompt_alone_at_every_point(engine: EagerEngine) -> None:
    batch, off = tiny.left_padded(engine.facts.d_vocab), {}
    at = tiny.addresses(engine, ("tokens",))
    together = tiny.read(engine, batch, at)
    for row in range(batch.shape[0]):
        prompt, length = alone(batch, row)
        for address, expected in tiny.read(engine, prompt, at).items():
            square = address.point in ("attn_scores", "attn_probs")
            got = (
                together[address][row : row + 1, ..., -length:, -length:]
                if square
                else together[address][row : row + 1, -length:]
            )
            off[f"{address} of row {row}"] = tiny.worst(got, expected)
    assert {where: error for where, error in off.items() if error > TOLERANCE} == {}


def test_nothing_attends_to_padding(engine: EagerEngine) -> None:
    batch = tiny.left_padded(engine.facts.d_vocab)
    for layer in range(engine.facts.n_layers):
        at = [Address("attn_probs", layer), Address("attn_scores", layer)]
        seen = tiny.read(engine, batch, at)
        pattern, scores = (seen[a] for a in at)
        hidden = (batch.mask == 0)[:, None, None, :].expand_as(pattern)
        assert not pattern[hidden].any() and scores[hidden].isneginf().all()
        rows = pattern.sum(-1).transpose(1, 2)
        assert torch.allclose(rows[batch.mask.bool()], torch.ones(())) and not rows[batch.mask == 0].any()


def test_what_stands_in_the_padding_changes_no_real_position(engine: EagerEngine) -> None:
    batch = tiny.left_padded(engine.facts.d_vocab)
    other = Batch(batch.tokens.masked_fill(batch.mask == 0, 17), batch.mask)
    real = batch.mask.bool()
    assert torch.equal(engine.run(batch, ())[real], engine.run(other, ())[real])


def test_a_boolean_mask_and_one_of_numbers_are_the_same_mask(engine: EagerEngine) -> None:
    batch = tiny.left_padded(engine.facts.d_vocab)
    assert torch.equal(engine.run(Batch(batch.tokens, batch.mask.bool()), ()), engine.run(batch, ()))


def test_a_mask_may_hide_a_position_in_the_middle(engine: EagerEngine) -> None:
    tokens = tiny.prompts(engine.facts.d_vocab, n=1)
    mask = torch.ones_like(tokens)
    mask[0, 3] = 0
    other = tokens.clone()
    other[0, 3] = (tokens[0, 3] + 1) % engine.facts.d_vocab
    after = slice(4, None)
    logits = engine.run(Batch(tokens, mask), ())
    assert torch.equal(logits[:, after], engine.run(Batch(other, mask), ())[:, after])
    assert tiny.worst(engine.run(Batch(tokens), ())[:, after], logits[:, after]) > 1e-3


def test_a_sliding_window_shorter_than_the_prompt_hides_what_lies_behind_it() -> None:
    for name in (tiny.GEMMA_2, "gemma-3"):
        engine = tiny.new_engine(name)
        windows = engine.facts.sliding_windows
        pattern = tiny.read(
            engine, Batch(tiny.prompts(300, n=1)), [Address("attn_probs", layer) for layer in range(len(windows))]
        )
        distance = torch.arange(11)[:, None] - torch.arange(11)
        assert {window is None for window in windows} == {True, False} and max(w for w in windows if w) < 11
        for window, seen in zip(windows, pattern.values()):
            reach = int(distance.expand_as(seen)[seen > 0].max())
            assert reach == (10 if window is None else window - 1)


def slices(seen: dict[Address, Tensor], past: int, new: int) -> dict[Address, Tensor]:
    """What a step of `new` positions after `past` cached ones is due to show, out of the whole forward's values."""
    out = {}
    for address, value in seen.items():
        if address.point in ("attn_scores", "attn_probs"):
            out[address] = value[..., past : past + new, : past + new]
        else:
            out[address] = value[:, : past + new] if address.point == "k_rot" else value[:, past : past + new]
    return out


@pytest.mark.parametrize("padded", [False, True])
def test_steps_with_a_cache_are_the_whole_forward_at_every_point(engine: EagerEngine, padded: bool) -> None:
    d_vocab = engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab) if padded else Batch(tiny.prompts(d_vocab))
    at, off, past = tiny.addresses(engine), {}, 0
    whole = tiny.read(engine, batch, at)
    cache = engine.new_cache()
    for new in (8, 1, 2):  # the prompt, one token, and two at once
        mask = None if batch.mask is None else batch.mask[:, : past + new]
        seen = tiny.read(engine, Batch(batch.tokens[:, past : past + new], mask), at, cache=cache)
        for address, expected in slices(whole, past, new).items():
            real = slice(None) if mask is None or address.point == "tokens" else mask[:, past:].bool().all(0)
            by_query = address.point in ("attn_scores", "attn_probs")
            if address.point == "k_rot" and mask is not None:
                real = mask.bool().all(0)
            pick = (lambda x: x[:, :, real]) if by_query else (lambda x: x[:, real])
            off[f"{address} at {past}"] = tiny.worst(pick(seen[address]), pick(expected))
        past += new
    assert {where: error for where, error in off.items() if error > TOLERANCE} == {}


def greedy(engine: EagerEngine, batch: Batch, steps: int) -> Tensor:
    left = iter(range(steps + 1))
    ids = engine.generate(batch, lambda step: (), lambda logits: logits.argmax(-1) if next(left) < steps else None)
    return torch.stack(list(ids), dim=1)


@pytest.mark.parametrize("padded", [False, True])
def test_greedy_generation_gives_hugging_faces_ids(engine: EagerEngine, reference: Any, padded: bool) -> None:
    d_vocab = engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab) if padded else Batch(tiny.prompts(d_vocab))
    mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
    settings = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = reference.generate(batch.tokens, attention_mask=mask, **settings)[:, batch.shape[1] :]
    assert torch.equal(greedy(engine, batch, steps=9), expected)


def test_taps_fire_at_every_step_of_a_generation_and_steer_it(engine: EagerEngine) -> None:
    batch, seen = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5)), []

    def taps(step: int) -> list[Tap]:
        steered = torch.zeros(engine.facts.d_vocab).index_fill(0, torch.tensor(40 + step), 1e4)
        return [
            Tap(Address("resid_post", 1), lambda x: seen.append((step, x.shape[1])), reads=True),
            Tap(Address("logits"), lambda x: x + steered),
        ]

    steps = iter(range(4))
    ids = engine.generate(batch, taps, lambda logits: logits.argmax(-1) if next(steps) < 3 else None)
    assert [int(i) for i in ids] == [40, 41, 42]
    assert seen == [(0, 5), (1, 1), (2, 1), (3, 1)]


def test_a_generation_computes_the_last_logits_only_unless_they_are_tapped(engine: EagerEngine) -> None:
    batch, shapes = Batch(tiny.prompts(engine.facts.d_vocab, n=1, length=5)), []
    next(
        engine.generate(
            batch, lambda step: [Tap(Address("lm_head"), lambda x: shapes.append(x.shape[1]))], lambda x: x.argmax(-1)
        )
    )
    last = engine.run(batch, (), last_only=True)
    assert shapes == [5] and last.shape[1] == 1 and tiny.worst(last[:, 0], engine.run(batch, ())[:, -1]) < 2e-6


@pytest.mark.parametrize("padded", [False, True])
def test_a_forward_that_starts_or_stops_at_a_layer_is_that_piece_of_the_whole(
    engine: EagerEngine, padded: bool
) -> None:
    n, d_vocab = engine.facts.n_layers, engine.facts.d_vocab
    batch = tiny.left_padded(d_vocab) if padded else Batch(tiny.prompts(d_vocab))
    real = slice(None) if batch.mask is None else batch.mask.bool()
    at = [Address("resid_pre", layer) for layer in range(n)]
    entering = [*tiny.read(engine, batch, at).values(), None]
    entering[n] = tiny.read(engine, batch, [Address("resid_post", n - 1)])[Address("resid_post", n - 1)]
    logits = engine.run(batch, ())
    for start in (None, *range(n + 1)):
        begin = None if start is None else (start, entering[start])
        assert torch.equal(engine.run(batch, (), start=begin)[real], logits[real])
        for stop in range(start or 0, n + 1):
            assert torch.equal(engine.run(batch, (), start=begin, stop=stop)[real], entering[stop][real])


def test_taps_of_a_piece_fire_in_that_piece_only(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    resid = tiny.read(engine, batch, [Address("resid_pre", 1)])[Address("resid_pre", 1)]
    fired: list[str] = []
    taps = [Tap(a, lambda x, a=a: fired.append(str(a)), reads=True) for a in tiny.addresses(engine, tiny.BRANCHES)]
    engine.run(batch, taps, start=(1, resid), stop=2)
    assert fired and set(fired) == {str(a) for a in tiny.addresses(engine, tiny.BRANCHES) if a.layer == 1}


def test_an_edit_before_the_stop_shows_in_what_comes_back_and_one_after_the_start_too(engine: EagerEngine) -> None:
    batch = Batch(tiny.prompts(engine.facts.d_vocab))
    zero = [Tap(Address("resid_pre", 1), torch.zeros_like)]
    whole = tiny.read(engine, batch, [Address("resid_post", 1)], zero)[Address("resid_post", 1)]
    stopped = engine.run(batch, zero, stop=2)
    started = engine.run(batch, zero, start=(1, torch.ones_like(whole)), stop=2)
    assert torch.equal(stopped, whole) and torch.equal(started, whole)


def test_without_unembedding_there_are_no_logits_but_everything_before_them(engine: EagerEngine) -> None:
    batch, at = Batch(tiny.prompts(engine.facts.d_vocab)), [Address("final_norm"), Address("resid_post", 2)]
    seen = tiny.read(engine, batch, at, unembed=False)
    assert engine.run(batch, (), unembed=False) is None
    assert all(torch.equal(seen[a], value) for a, value in tiny.read(engine, batch, at).items())


def test_a_piece_whose_ends_are_out_of_order_is_refused(engine: EagerEngine) -> None:
    batch, resid = Batch(torch.tensor([[1, 2]])), torch.zeros(1, 2, engine.facts.d_model)
    for options in (dict(start=(2, resid), stop=1), dict(stop=-1), dict(stop=99), dict(start=(99, resid))):
        with pytest.raises(BadInput, match="in order, from 0"):
            engine.run(batch, (), **options)


def test_a_cache_that_a_piece_left_incomplete_is_not_continued(engine: EagerEngine) -> None:
    batch, cache = Batch(torch.tensor([[1, 2, 3]])), engine.new_cache()
    engine.run(batch, (), stop=1, cache=cache)
    assert engine.run(batch, (), stop=1, cache=cache).shape[1] == 3  # the same piece may go on
    with pytest.raises(BadInput, match="left it incomplete"):
        engine.run(batch, (), cache=cache)


def test_gradients_flow_into_the_residual_that_a_piece_starts_with(engine: EagerEngine) -> None:
    resid = torch.randn(1, 4, engine.facts.d_model, generator=torch.Generator().manual_seed(2)).requires_grad_()
    out = engine.run(Batch(torch.ones(1, 4, dtype=torch.long)), (), start=(1, resid), stop=2, grad=True)
    assert torch.autograd.grad(out.sum(), resid)[0].abs().min() > 0
