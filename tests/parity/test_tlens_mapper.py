"""The mapper's table against the real library: HookedTransformer's names, and what the Bridge's names mean.

The Bridge of TransformerLens 3.9 runs the raw model, so a name of its own is held to the engine's raw value at the
address, and an edit there to the same edit at the address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.eager.engine import EagerEngine
from engine.eager.load import load_eager
from engine.errors import Refused
from engine.points import Address
from engine.seam import Batch
from engine.taps import Tap
from mappers import tlens as mapper
from tests.hub import NAMES
from tests.reference import reference_model

TOLERANCE = 1e-5  # of the largest magnitude
TOKENS = torch.arange(3, 14)[None]  # longer than a sliding window
LAYER = 1
SWITCHES = {
    "use_attn_result": "set_use_attn_result",
    "use_split_qkv_input": "set_use_split_qkv_input",
    "use_attn_in": "set_use_attn_in",
    "use_hook_mlp_in": "set_use_hook_mlp_in",
}
# The Bridge splits a fused rotary projection by itself and leaves these two out.
NEVER_FIRE = {"EleutherAI/pythia-70m": ("attn.hook_rot_q", "attn.hook_rot_k")}


@lru_cache(maxsize=None)
def engine_of(name: str) -> EagerEngine:
    return load_eager(name)


@lru_cache(maxsize=None)
def bridge_of(name: str) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(name, device="cpu")


@lru_cache(maxsize=None)
def hooked_transformer_of(name: str) -> Any:
    return reference_model(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_real_model_in_its_order(name: str) -> None:
    assert mapper.names(engine_of(name).facts) == list(hooked_transformer_of(name).hook_dict)


@pytest.mark.parametrize("name", NAMES)
def test_names_with_the_token_hook_are_those_of_the_real_model_too(name: str) -> None:
    from transformer_lens import HookedTransformer

    cfg = dataclasses.replace(hooked_transformer_of(name).cfg, use_hook_tokens=True)
    expected = list(HookedTransformer(cfg).hook_dict)
    assert mapper.names(engine_of(name).facts, use_hook_tokens=True) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_is_what_the_real_model_asserts_before_it_takes_a_hook(name: str) -> None:
    model = hooked_transformer_of(name)
    for hook in model.hook_dict:
        flag = mapper.flag(hook)
        if flag is not None:
            with pytest.raises(AssertionError):
                model.add_hook(hook, _nothing)
            setattr(model.cfg, flag, True)
        model.add_hook(hook, _nothing)  # an unflagged name is taken as it is
        model.reset_hooks()
        if flag is not None:
            setattr(model.cfg, flag, False)


def _nothing(value: Tensor, hook: Any) -> None:
    return None


def test_short_forms_give_the_names_that_the_real_function_gives() -> None:
    from compat.tlens.utils import get_act_name
    from transformer_lens.utilities import get_act_name as reference

    for row in mapper.ROWS:
        owner, _, hook = row.name.rpartition(".")
        short = hook.removeprefix("hook_")
        for parts in ((short,), (short, 2), (short, 2, owner)):
            assert get_act_name(*parts) == reference(*parts)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_bridge_is_mapped_or_unmapped_with_a_reason(name: str) -> None:
    facts = engine_of(name).facts
    for hook in bridge_of(name).hook_dict:
        try:
            address = mapper.to_address(hook, facts)
        except Refused as refusal:
            assert "has no canonical point: " in str(refusal)
        else:
            assert hook in mapper.to_names(address, facts)


@pytest.mark.parametrize("name", NAMES)
def test_every_alias_and_unmapped_name_is_a_name_of_some_bridge(name: str) -> None:
    """And on this family, of this one: the table lists nothing that the real library lacks."""
    known, facts = bridge_of(name).hook_dict, engine_of(name).facts
    fused = ("attn.qkv.hook_in", "attn.qkv.hook_out")  # facts do not tell whether a checkpoint's projection is fused
    for row in (*mapper.ALIASES, *mapper.UNMAPPED):
        if row.has(facts) and row.name not in fused:
            assert (f"blocks.{LAYER}.{row.name}" if row.layered else row.name) in known
    assert all(any(f"blocks.0.{hook}" in bridge_of(other).hook_dict for other in NAMES) for hook in fused)


def mapped(name: str) -> Iterator[tuple[str, Address]]:
    """The Bridge's names in one layer and outside the layers, with their addresses, where the engine serves them."""
    engine = engine_of(name)
    for hook in bridge_of(name).hook_dict:
        try:
            address = mapper.to_address(hook, engine.facts)
        except Refused:
            continue
        local = hook.removeprefix(f"blocks.{LAYER}.")
        if address.layer not in (None, LAYER) or local in NEVER_FIRE.get(name, ()):
            continue
        if engine.refuses(address, "read") is not None:
            assert address.point == "attn_stream_in"  # as HookedTransformer under grouped attention
            continue
        yield hook, address


def bridge_layout(address: Address, value: Tensor) -> Tensor:
    """Our value in the layout that the Bridge shows: around the norms of q and k, heads come before positions."""
    return value.transpose(1, 2) if address.point.startswith(("q_norm_", "k_norm_")) else value


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_bridge_shows_at_a_name_what_the_engine_has_at_its_address(name: str) -> None:
    for hook, address in mapped(name):
        expected, found = [], []
        _run_bridge(name, hook, lambda value, hook: expected.append(value.clone()))
        engine_of(name).run(Batch(TOKENS), [Tap(address, lambda value: found.append(value.clone()), reads=True)])
        assert_close(bridge_layout(address, found[-1]), expected[-1], hook)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_edit_at_a_name_of_the_bridge_does_what_it_does_at_the_address(name: str) -> None:
    plain = engine_of(name).run(Batch(TOKENS), [])
    for hook, address in mapped(name):
        if hook.endswith("hook_resid_mid"):
            continue  # the Bridge edits only the norm's input there, HookedTransformer and we the stream itself: below
        expected = _run_bridge(name, hook, lambda value, hook: _edited(value))
        tap = Tap(address, lambda value: bridge_layout(address, _edited(bridge_layout(address, value))))
        found = engine_of(name).run(Batch(TOKENS), [tap])
        assert_close(found, expected, hook)
        assert (found - plain).abs().max() > 100 * TOLERANCE * plain.abs().max(), f"the edit at {hook} reached nothing"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "EleutherAI/pythia-70m"])
@torch.no_grad()
def test_resid_mid_is_hooked_transformers_and_not_the_bridges_copy(name: str) -> None:
    """The Bridge's edit reaches what the MLP's norm reads; HookedTransformer's reaches the skip too."""
    hook, facts = f"blocks.{LAYER}.hook_resid_mid", engine_of(name).facts
    of_bridge = _run_bridge(name, hook, lambda value, hook: _edited(value))
    copy = engine_of(name).run(Batch(TOKENS), [Tap(Address("mlp_stream_in", LAYER), _edited)])
    stream = engine_of(name).run(Batch(TOKENS), [Tap(mapper.to_address(hook, facts), _edited)])
    assert_close(copy, of_bridge, hook)
    assert (stream - of_bridge).abs().max() > 100 * TOLERANCE * stream.abs().max()


def _run_bridge(name: str, hook: str, act: Any) -> Tensor:
    bridge, flag = bridge_of(name), mapper.flag(hook)
    if flag is None:
        return bridge.run_with_hooks(TOKENS, fwd_hooks=[(hook, act)])
    switch = getattr(bridge, SWITCHES[flag])
    switch(True)
    try:
        return bridge.run_with_hooks(TOKENS, fwd_hooks=[(hook, act)])
    finally:
        switch(False)


def _edited(value: Tensor) -> Tensor:
    noise = torch.rand(value.numel(), generator=torch.Generator().manual_seed(0)).reshape(value.shape)
    return value * (1 + 0.2 * noise)


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal to TOLERANCE; where scores are masked, one has -inf and the other the most negative number."""
    assert found.shape == expected.shape, what
    masked = found == -torch.inf
    assert (expected[masked] <= torch.finfo(expected.dtype).min).all(), what
    error = (found[~masked] - expected[~masked]).abs().max()
    assert error <= TOLERANCE * expected[~masked].abs().max(), f"{what}: {error}"
