"""The same edit on both sides, at every name that a hook can write to: logits and every cached name follow it alike.

The quick run makes one edit at each name of a middle layer, another one on the processed than on the raw model; the
slow sweep makes each edit at each name of the first and the last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.pairs import Pair, assert_close, assert_same_cache, random_tokens

LAYER = 1
# An edit in place at one of these also changes what TransformerLens has cached under the name before: it hands out the
# very same tensor at both. Ours shows what was there when the first fired.
TWINS = {"unembed.hook_in": "ln_final.hook_normalized", "blocks.0.hook_resid_pre": "hook_embed"}
TWINS |= {f"blocks.{layer}.hook_resid_pre": f"blocks.{layer - 1}.hook_resid_post" for layer in range(1, 4)}


def noise_like(value: Tensor) -> Tensor:
    """Noise of the size of `value`, away from 0 so that it can stand for a scale; -inf stays where it is."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(value.shape, generator=generator) + 0.3
    if value.shape[-1] > 1:
        noise = noise * torch.where(torch.rand(value.shape, generator=generator) < 0.4, -1.0, 1.0)
    finite = torch.isfinite(value)
    return torch.where(finite, noise * value[finite].abs().mean(), value)


def replace(value: Tensor, hook: Any) -> Tensor:
    return noise_like(value)


def scale(value: Tensor, hook: Any) -> Tensor:
    return value * 1.5


def edit_in_place(value: Tensor, hook: Any) -> None:
    value[:, -1] = value[:, -1] * 0.5 + 0.3  # its mean over d_model is not 0


def edit_data(value: Tensor, hook: Any) -> None:
    value.data[:, :2] *= 1.7


EDITS: dict[str, Callable[[Tensor, Any], Tensor | None]] = {
    "replaced": replace,
    "scaled": scale,
    "in place": edit_in_place,
    "through .data": edit_data,
}


def names_of(pair: Pair, layer: int = LAYER) -> list[str]:
    """Every name outside the blocks and in one of them that a hook may be put on, given the switches that are on.

    test_tlens_reads.py says which names of TransformerLens' are refused here.
    """
    on = pair.theirs.cfg
    off = tuple(
        name
        for name, switch in {"hook_attn_in": on.use_attn_in, "hook_q_input": on.use_split_qkv_input}.items()
        if not switch
    )
    off += ("hook_k_input", "hook_v_input") * ("hook_q_input" in off)
    own = [
        name for name in pair.theirs.hook_dict if name.startswith((f"blocks.{layer}.", "hook_", "ln_final", "unembed"))
    ]
    return [name for name in own if not name.endswith(off) and name in pair.ours.hook_dict and "indices" not in name]


def switch_on(pair: Pair, by_head: str = "split_qkv_input") -> None:
    """All switches but one of the two that copy the stream for each head.

    Under both, TransformerLens loses an edit of hook_attn_in: queries, keys and values read their own copies only.
    """
    pair.switch("attn_result", "hook_mlp_in", by_head)


def assert_edit_is_followed_alike(
    pair: Pair, hooks: list[tuple[Any, Callable]], leave_out: tuple[str, ...] = (), floor: float = 1e-9
) -> None:
    tokens = random_tokens(pair)

    def run(model: Any) -> Any:
        with model.hooks(fwd_hooks=hooks):
            return model.run_with_cache(tokens)

    (logits, cache), (their_logits, their_cache) = pair.both(run)
    assert_close(logits, their_logits, "logits")
    assert_same_cache(cache, their_cache, floor=floor, leave_out=leave_out)


def twin_of(name: str, edit: Callable) -> tuple[str, ...]:
    return (TWINS[name],) if name in TWINS and edit in (edit_in_place, edit_data) else ()


def assert_edits_are_followed_alike(pair: Pair, edits: list[tuple[str, str]]) -> None:
    failures = {}
    for name, kind in edits:
        try:
            assert_edit_is_followed_alike(pair, [(name, EDITS[kind])], leave_out=twin_of(name, EDITS[kind]))
        except AssertionError as failure:
            failures[name, kind] = str(failure)[:300]
    assert not failures, failures


def test_an_edit_at_every_name_is_followed_alike(pair: Pair) -> None:
    switch_on(pair)
    kinds = list(EDITS)
    edits = [(name, kinds[(i + 2 * pair.processed) % len(kinds)]) for i, name in enumerate(names_of(pair))]
    with torch.no_grad():
        assert_edits_are_followed_alike(pair, edits)


def test_an_edit_at_every_name_is_followed_alike_with_gradients_on(processed_pair: Pair) -> None:
    switch_on(processed_pair)
    kinds = ["replaced", "scaled", "in place"]
    edits = [(name, kinds[i // 2 % len(kinds)]) for i, name in enumerate(names_of(processed_pair)) if i % 2]
    assert_edits_are_followed_alike(processed_pair, edits)


def test_an_edit_of_the_stream_that_attention_reads_is_followed_alike(pair: Pair) -> None:
    if "attn_in" not in pair.switches:
        for model in (pair.ours, pair.theirs):
            with pytest.raises(AssertionError):
                model.set_use_attn_in(True)
        return
    switch_on(pair, by_head="attn_in")
    with torch.no_grad():
        assert_edits_are_followed_alike(pair, [(f"blocks.{LAYER}.hook_attn_in", kind) for kind in EDITS])


def test_two_edits_at_once_are_followed_alike(pair: Pair) -> None:
    switch_on(pair)
    hooks = [
        (f"blocks.{LAYER}.hook_resid_pre", edit_in_place),
        (f"blocks.{LAYER}.hook_resid_pre", scale),
        (f"blocks.{LAYER}.attn.hook_v", replace),
        (f"blocks.{LAYER}.hook_mlp_out", edit_in_place),
        ("blocks.2.hook_q_input", scale),
        ("ln_final.hook_scale", scale),
    ]
    assert_edit_is_followed_alike(pair, hooks, leave_out=(f"blocks.{LAYER - 1}.hook_resid_post",))


@pytest.mark.parametrize("ending", ["hook_resid_post", "attn.hook_z", "ln1.hook_normalized"])
def test_an_edit_in_every_layer_is_followed_alike(pair: Pair, ending: str) -> None:
    switch_on(pair)
    assert_edit_is_followed_alike(pair, [(lambda name: name.endswith(ending), scale)])


@pytest.mark.parametrize("ending", ["hook_resid_pre", "attn.hook_k", "hook_attn_out"])
def test_an_edit_of_one_position_is_followed_alike(pair: Pair, ending: str) -> None:
    def steer(value: Tensor, hook: Any) -> Tensor:
        value[:, 3] += 0.7
        return value

    leave_out = twin_of(f"blocks.{LAYER}.{ending}", edit_in_place)
    assert_edit_is_followed_alike(pair, [(f"blocks.{LAYER}.{ending}", steer)], leave_out=leave_out)


def ablate_head(pattern: Tensor, hook: Any) -> Tensor:
    pattern[:, 1] = 0
    return pattern


def leave_out_first_key(pattern: Tensor, hook: Any) -> None:
    pattern[..., 0] = 0


def block_a_key(scores: Tensor, hook: Any) -> None:
    scores[:, :, 4:, 2] = float("-inf")


def block_every_key(scores: Tensor, hook: Any) -> Tensor:
    return torch.full_like(scores, float("-inf"))


def open_the_future(pattern: Tensor, hook: Any) -> Tensor:
    return torch.full_like(pattern, 0.25)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("hook_pattern", ablate_head),
        ("hook_pattern", leave_out_first_key),
        ("hook_pattern", open_the_future),
        ("hook_attn_scores", block_a_key),
        ("hook_attn_scores", block_every_key),
    ],
)
@pytest.mark.parametrize("everywhere", [False, True])
def test_rows_of_attention_that_no_longer_sum_to_one_are_followed_alike(
    pair: Pair, name: str, edit: Callable, everywhere: bool
) -> None:
    switch_on(pair)
    where = (lambda each: each.endswith(name)) if everywhere else f"blocks.{LAYER}.attn.{name}"
    # where nothing is attended to, the results are exactly 0 there and 0 but for rounding here
    assert_edit_is_followed_alike(pair, [(where, edit)], floor=0.1)


def test_edits_of_padded_prompts_are_followed_alike_where_there_is_text(pair: Pair) -> None:
    tokens, mask = random_tokens(pair), torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    for ending, edit in (
        ("hook_resid_pre", scale),
        ("attn.hook_pattern", leave_out_first_key),
        ("attn.hook_v", edit_in_place),
    ):
        hooks = [(f"blocks.{LAYER}.{ending}", edit)]
        found, expected = pair.both(lambda model: model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks))
        attended = mask.bool()
        assert_close(found[attended], expected[attended], ending)


def test_an_edit_made_on_the_way_is_seen_by_hooks_further_on(pair: Pair) -> None:
    """A value that one hook keeps and another puts back elsewhere, as activation patching within one run does."""
    kept: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        kept["z"] = value

    def put_back(value: Tensor, hook: Any) -> Tensor:
        return value + kept["z"].mean(1, keepdim=True)

    hooks = [(f"blocks.{LAYER}.hook_resid_pre", keep), ("blocks.2.hook_resid_pre", put_back)]
    assert_edit_is_followed_alike(pair, hooks)


def test_hooks_leave_nothing_behind(processed_pair: Pair) -> None:
    ours, tokens = processed_pair.ours, random_tokens(processed_pair)
    before = ours(tokens)
    switch_on(processed_pair)
    with torch.no_grad():
        for name in names_of(processed_pair):
            ours.run_with_hooks(tokens, fwd_hooks=[(name, replace)])
    processed_pair.reset()
    assert torch.equal(ours(tokens), before)
    assert not any(point.is_live for point in ours.hook_points())


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("kind", EDITS)
def test_every_edit_at_every_name_is_followed_alike(pair: Pair, kind: str, layer: int) -> None:
    switch_on(pair)
    layer %= pair.theirs.cfg.n_layers
    with torch.no_grad():
        assert_edits_are_followed_alike(pair, [(name, kind) for name in names_of(pair, layer)])
