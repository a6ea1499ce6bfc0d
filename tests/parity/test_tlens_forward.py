"""Every argument of a forward: what is returned, where it starts and stops, and what a key/value cache continues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.pairs import Pair, assert_close, assert_same_cache, random_tokens

TEXTS = ["Hello", "When Mary and John went to the store, John gave a drink to", "The cat sat on the mat"]
LAYERS = (None, 0, 1, 2, -1, -2, 9)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def residual_for(pair: Pair, rows: int = 2, pos: int = 9) -> Tensor:
    """A residual whose mean over d_model is not 0, `[rows, pos, d_model]`."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, pos, pair.theirs.cfg.d_model, generator=generator) + 0.4


@pytest.mark.parametrize("return_type", ["logits", "loss", "both", None, "nonsense"])
@pytest.mark.parametrize("per_token", [False, True])
def test_every_return_type_returns_the_same(pair: Pair, return_type: str | None, per_token: bool) -> None:
    arguments = dict(return_type=return_type, loss_per_token=per_token)
    found, expected = pair.both(lambda model: model(random_tokens(pair), **arguments))
    assert_close(found, expected)
    if return_type == "both":
        assert_close([found.logits, found.loss], [expected.logits, expected.loss])


def test_hooks_up_to_the_final_norm_fire_where_nothing_is_returned(pair: Pair) -> None:
    run = lambda model: model.run_with_cache(random_tokens(pair), return_type=None)  # noqa: E731
    (nothing, cache), (_, their_cache) = pair.both(run)
    assert nothing is None
    assert_same_cache(cache, their_cache)


@pytest.mark.parametrize("kind", ["text", "texts", "a list of one", "a flat row", "rows"])
@pytest.mark.parametrize("prepend_bos", [None, True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_kind_of_input_gives_the_same_loss(
    processed_pair: Pair, kind: str, prepend_bos: bool | None, side: str
) -> None:
    inputs = {
        "text": TEXTS[1],
        "texts": TEXTS,
        "a list of one": TEXTS[:1],
        "a flat row": random_tokens(processed_pair)[0],
        "rows": random_tokens(processed_pair),
    }
    arguments = dict(return_type="loss", prepend_bos=prepend_bos, padding_side=side, loss_per_token=True)
    assert_close(*processed_pair.both(lambda model: model(inputs[kind], **arguments)))


def test_defaults_of_the_model_stand_after_a_call_that_overrides_them(pair: Pair) -> None:
    before = [(model.tokenizer.padding_side, model.cfg.default_prepend_bos) for model in (pair.ours, pair.theirs)]
    pair.both(lambda model: model(TEXTS, prepend_bos=not model.cfg.default_prepend_bos, padding_side="left"))
    after = [(model.tokenizer.padding_side, model.cfg.default_prepend_bos) for model in (pair.ours, pair.theirs)]
    assert before == after and before[0] == before[1]


@pytest.mark.parametrize("stop", LAYERS[1:])
def test_a_forward_stops_at_the_same_residual(pair: Pair, stop: int) -> None:
    run = lambda model: model.run_with_cache(random_tokens(pair), stop_at_layer=stop)  # noqa: E731
    (found, cache), (expected, their_cache) = pair.both(run)
    assert_close(found, expected)
    assert_same_cache(cache, their_cache)


@pytest.mark.parametrize("start", LAYERS[1:])
def test_a_forward_starts_at_a_residual_and_goes_where_theirs_goes(pair: Pair, start: int) -> None:
    residual, tokens = residual_for(pair), random_tokens(pair)
    for stop in LAYERS:
        found, expected = pair.both(lambda model: model(residual, start_at_layer=start, stop_at_layer=stop))
        assert_close(found, expected, f"{start} to {stop}")
    run = lambda model: model.run_with_cache(residual, start_at_layer=start, tokens=tokens, return_type="both")  # noqa: E731
    (found, cache), (expected, their_cache) = pair.both(run)
    assert_close(found, expected)
    assert_same_cache(cache, their_cache)


def test_stopping_and_starting_again_is_going_through(pair: Pair) -> None:
    tokens = random_tokens(pair)
    for layer in range(pair.ours.cfg.n_layers + 1):
        halfway = pair.ours(tokens, stop_at_layer=layer)
        assert_close(pair.ours(halfway, start_at_layer=layer), pair.ours(tokens), f"at {layer}")


@pytest.mark.parametrize("mask", [[[1] * 9, [0] * 4 + [1] * 5], [[1] * 9, [1, 0, 0] + [1] * 6]])
def test_a_mask_is_heeded_by_a_forward_that_starts_at_a_layer(pair: Pair, mask: list) -> None:
    mask = torch.tensor(mask)
    if pair.theirs.cfg.positional_embedding_type == "alibi" and 0 in mask[1, 1:] and mask[1, 0]:
        pytest.skip("TransformerLens counts distances over masked positions too; Hugging Face and ours do not")
    residual, tokens = residual_for(pair), random_tokens(pair)
    arguments = dict(start_at_layer=1, attention_mask=mask, tokens=tokens, return_type="both")
    found, expected = pair.both(lambda model: model(residual, **arguments))
    assert_close(found.logits[mask.bool()], expected.logits[mask.bool()])
    assert_close(found.loss, expected.loss)


def test_a_loss_from_a_layer_needs_the_tokens(pair: Pair) -> None:
    for model in (pair.ours, pair.theirs):
        with pytest.raises(AssertionError):
            model(residual_for(pair), start_at_layer=1, return_type="loss")


def test_an_input_is_embedded_alike(pair: Pair) -> None:
    for input, arguments in ((random_tokens(pair), {}), (TEXTS[1], {}), (TEXTS[0], dict(prepend_bos=False))):
        found, expected = pair.both(lambda model: model.input_to_embed(input, **arguments))
        assert_close(found, expected)

    def padded(model: Any) -> Any:
        # as an argument of input_to_embed itself, TransformerLens pads on that side and leaves the mask out
        side, model.tokenizer.padding_side = model.tokenizer.padding_side, "left"
        try:
            return model.input_to_embed(TEXTS)
        finally:
            model.tokenizer.padding_side = side

    found, expected = pair.both(padded)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[3], expected[3])
    assert_close(found[0][found[3].bool()], expected[0][found[3].bool()])


# --- key/value caches -----------------------------------------------------------------------------------------------


def new_cache(model: Any, rows: int) -> Any:
    if type(model).__module__.startswith("transformer_lens"):
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache
    else:
        from compat.tlens.past_key_value_caching import HookedTransformerKeyValueCache as Cache
    return Cache.init_cache(model.cfg, "cpu", rows)


def assert_same_entries(found: Any, expected: Any) -> None:
    for layer, (mine, other) in enumerate(zip(found.entries, expected.entries, strict=True)):
        assert_close([mine.past_keys, mine.past_values], [other.past_keys, other.past_values], f"layer {layer}")
    assert torch.equal(found.previous_attention_mask, expected.previous_attention_mask)


def test_a_prompt_in_pieces_is_the_prompt_as_a_whole(pair: Pair) -> None:
    tokens = random_tokens(pair, pos=12)
    whole = pair.ours(tokens)
    past = new_cache(pair.ours, 2)
    pieces = [pair.ours(tokens[:, a:b], past_kv_cache=past) for a, b in ((0, 5), (5, 6), (6, 12))]
    assert_close(torch.cat(pieces, 1), whole)


def test_a_cache_holds_the_same_keys_and_values_and_shows_the_same_activations(pair: Pair) -> None:
    tokens = random_tokens(pair, pos=12)

    def run(model: Any) -> Any:
        past = new_cache(model, 2)
        results = [model.run_with_cache(tokens[:, a:b], past_kv_cache=past) for a, b in ((0, 5), (5, 6), (6, 12))]
        return past, results

    (past, found), (their_past, expected) = pair.both(run)
    for (logits, cache), (their_logits, their_cache) in zip(found, expected):
        assert_close(logits, their_logits)
        assert_same_cache(cache, their_cache)
    assert_same_entries(past, their_past)


def test_a_frozen_cache_serves_many_continuations(pair: Pair) -> None:
    prefix, ways = random_tokens(pair, pos=4), [random_tokens(pair, pos=n, seed=n) for n in (3, 1, 6)]

    def run(model: Any) -> Any:
        past = new_cache(model, 2)
        model(prefix, past_kv_cache=past)
        past.freeze()
        frozen = [model(way, past_kv_cache=past) for way in ways]
        past.unfreeze()
        return past, [*frozen, model(ways[0], past_kv_cache=past), model(ways[1], past_kv_cache=past)]

    (past, found), (their_past, expected) = pair.both(run)
    assert_close(found, expected)
    assert_same_entries(past, their_past)
    for way, logits in zip(ways, found):
        assert_close(logits, pair.ours(torch.cat([prefix, way], 1))[:, 4:])


def test_texts_padded_on_the_left_continue_from_a_cache(pair: Pair) -> None:
    from transformer_lens.utilities import get_attention_mask

    tokens = pair.theirs.to_tokens(TEXTS, padding_side="left")
    mask = get_attention_mask(pair.theirs.tokenizer, tokens, pair.theirs.cfg.default_prepend_bos, padding_side="left")
    more = random_tokens(pair, rows=3, pos=4)

    def run(model: Any) -> Any:
        past = new_cache(model, 3)
        first = model(tokens, attention_mask=mask, past_kv_cache=past)
        return past, first[mask.bool()], model(more, past_kv_cache=past, attention_mask=torch.ones_like(more))

    (past, *found), (their_past, *expected) = pair.both(run)
    assert_close(found, expected)
    assert torch.equal(past.previous_attention_mask, their_past.previous_attention_mask)
    for layer, entry in enumerate(past.entries):
        attended = past.previous_attention_mask.bool()
        other = their_past.entries[layer]
        assert_close(entry.past_keys[attended], other.past_keys[attended])
        assert_close(entry.past_values[attended], other.past_values[attended])


def test_hooks_edit_what_enters_a_cache(pair: Pair) -> None:
    tokens = random_tokens(pair, pos=8)
    hooks = [("blocks.1.attn.hook_k", lambda k, hook: k * 1.3), ("blocks.0.attn.hook_v", lambda v, hook: v + 0.2)]

    def run(model: Any) -> Any:
        past = new_cache(model, 2)
        model.run_with_hooks(tokens[:, :5], past_kv_cache=past, fwd_hooks=hooks)
        return past, model(tokens[:, 5:], past_kv_cache=past)

    (past, found), (their_past, expected) = pair.both(run)
    assert_close(found, expected)
    assert_same_entries(past, their_past)


def test_a_forward_that_starts_at_the_first_layer_continues_a_cache_too(pair: Pair) -> None:
    tokens, residual = random_tokens(pair, pos=5), residual_for(pair, pos=3)

    def run(model: Any) -> Any:
        past = new_cache(model, 2)
        model(tokens, past_kv_cache=past)
        return past, model(residual, start_at_layer=0, past_kv_cache=past)

    (past, found), (their_past, expected) = pair.both(run)
    assert_close(found, expected)
    assert_same_entries(past, their_past)
