"""What a forward computes, read under every name: TransformerLens' numbers, names, order, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import UnknownName
from tests.parity.pairs import EXPERTS, TOLERANCE, Pair, assert_close, assert_same_cache, error, random_tokens

TEXTS = ["Hello", "When Mary and John went to the store, John gave a drink to", "The cat sat on the mat"]
PROMPTS: dict[str, Callable[[Pair], Any]] = {
    "rows": lambda pair: random_tokens(pair, rows=3, pos=11),
    "one token": lambda pair: random_tokens(pair, rows=1, pos=1),
    "a flat row": lambda pair: random_tokens(pair, rows=1, pos=7)[0],
    "text": lambda pair: TEXTS[1],
    "texts": lambda pair: TEXTS,
}
MASKS = {
    "padding on the left": [[1] * 10, [0] * 3 + [1] * 7, [0] * 7 + [1] * 3],
    "padding on the right": [[1] * 10, [1] * 7 + [0] * 3, [1] * 3 + [0] * 7],
    "a hole": [[1] * 10, [1] * 4 + [0] * 2 + [1] * 4, [0] + [1] * 8 + [0]],
    "everything": [[1] * 10] * 3,
}


@torch.no_grad()
def assert_same_run(pair: Pair, input: Any, **arguments: Any) -> None:
    (out, cache), (their_out, their_cache) = pair.both(lambda model: model.run_with_cache(input, **arguments))
    assert_close(out, their_out, "output")
    assert_same_cache(cache, their_cache)


def at_attended(value: Tensor, mask: Tensor, name: str) -> Tensor:
    """The rows of an activation that belong to positions that may be attended to; padding's own are nobody's."""
    if name.endswith(("hook_pattern", "hook_attn_scores")):
        value = value.transpose(1, 2)
    if value.shape[: mask.dim()] != mask.shape:  # the norms of q and k see one row a head, routers one a token
        value = value.view(*mask.shape, -1, value.shape[-1])
    return value[mask]


@torch.no_grad()
def assert_same_where_attended(pair: Pair, mask: Tensor, input: Any, **arguments: Any) -> None:
    (logits, cache), (their_logits, their_cache) = pair.both(lambda model: model.run_with_cache(input, **arguments))
    assert_close(logits[mask], their_logits[mask], "logits")
    assert list(cache) == [name for name in their_cache if name in cache or not EXPERTS.match(name)]
    off = {
        name: error(at_attended(cache[name], mask, name), at_attended(their_cache[name], mask, name)) for name in cache
    }
    assert max(off.values()) <= TOLERANCE, {name: value for name, value in off.items() if value > TOLERANCE}


def test_hook_names_are_listed_alike(pair: Pair) -> None:
    missing = {name for name in pair.theirs.hook_dict if name not in pair.ours.hook_dict}
    assert list(pair.ours.hook_dict) == [name for name in pair.theirs.hook_dict if name not in missing]
    for name in missing:
        assert EXPERTS.match(name) or name == "hook_pos_embed", f"{name} is missing"  # the latter never fires there
        with pytest.raises(UnknownName, match="expert|linear biases"):
            pair.ours.add_hook(name, print)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_activation_and_the_logits_are_theirs(pair: Pair, prompt: str) -> None:
    assert_same_run(pair, PROMPTS[prompt](pair))


@pytest.mark.parametrize("n_switches", [1, 2, 3, 4])
def test_activations_that_a_switch_turns_on_are_theirs_too(pair: Pair, n_switches: int) -> None:
    for switches in [[s] for s in pair.switches] if n_switches == 1 else [pair.switches[:n_switches]]:
        pair.switch(*switches)
        assert_same_run(pair, random_tokens(pair))


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_a_text_is_run_with_and_without_bos_as_theirs(pair: Pair, prepend_bos: bool) -> None:
    assert_same_run(pair, TEXTS[1], prepend_bos=prepend_bos)
    assert_same_run(pair, TEXTS[0], prepend_bos=prepend_bos, return_type="loss")


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_texts_padded_on_the_left_are_theirs_where_there_is_text(pair: Pair, prepend_bos: bool) -> None:
    from transformer_lens.utilities import get_attention_mask

    arguments = dict(prepend_bos=prepend_bos, padding_side="left")
    tokens = pair.theirs.to_tokens(TEXTS, **arguments)
    mask = get_attention_mask(pair.theirs.tokenizer, tokens, prepend_bos, padding_side="left").bool()
    assert 0 < mask.sum() < mask.numel()
    assert_same_where_attended(pair, mask, TEXTS, **arguments)


def skip_holes_in_linear_biases(pair: Pair) -> None:
    if pair.theirs.cfg.positional_embedding_type == "alibi":
        pytest.skip("TransformerLens counts distances over masked positions too; Hugging Face and ours do not")


@pytest.mark.parametrize("kind", MASKS)
def test_an_attention_mask_hides_the_same_positions(pair: Pair, kind: str) -> None:
    if kind == "a hole":
        skip_holes_in_linear_biases(pair)
    mask = torch.tensor(MASKS[kind])
    tokens = random_tokens(pair, *mask.shape)
    assert_same_where_attended(pair, mask.bool(), tokens, attention_mask=mask)


def test_what_is_padded_on_the_left_is_what_is_not_padded(pair: Pair) -> None:
    """Held to ourselves: a text gives the same numbers alone and in a padded batch."""
    with torch.no_grad():
        together = pair.ours(TEXTS, padding_side="left")
        for row, text in enumerate(TEXTS):
            alone = pair.ours(text)[0]
            assert_close(together[row, -len(alone) :], alone, text)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_losses_are_theirs_on_padded_texts_too(pair: Pair, side: str, per_token: bool) -> None:
    arguments = dict(return_type="loss", loss_per_token=per_token, padding_side=side)
    assert_close(*pair.both(lambda model: model(TEXTS, **arguments)))
    skip_holes_in_linear_biases(pair)
    tokens, mask = random_tokens(pair, rows=3, pos=10), torch.tensor(MASKS["a hole"])
    assert_close(*pair.both(lambda model: model(tokens, attention_mask=mask, **arguments)))


def test_a_cache_is_narrowed_like_theirs(pair: Pair) -> None:
    tokens = random_tokens(pair)
    for arguments in (
        dict(names_filter="blocks.1.attn.hook_z"),
        dict(names_filter=["blocks.0.hook_resid_post", "ln_final.hook_scale"]),
        dict(names_filter=lambda name: name.endswith(("hook_k", "hook_pattern"))),
        dict(pos_slice=-1),
        dict(pos_slice=(2, 5)),
        dict(stop_at_layer=1),
    ):
        assert_same_run(pair, tokens, **arguments)
    # TransformerLens raises IndexError on what the norms of q and k and routers see, which has no batch axis to remove
    assert_same_run(
        pair,
        tokens[:1],
        remove_batch_dim=True,
        names_filter=lambda name: not any(part in name for part in ("attn.q_norm", "attn.k_norm", "hook_expert")),
    )
