"""The key/value cache that a program sees, and when it no longer says what the engine's cache holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from compat.tlens.past_key_value_caching import HookedTransformerKeyValueCache as Cache

CFG = HookedTransformerConfig(
    d_model=12, d_head=3, n_layers=2, n_ctx=7, n_heads=4, n_key_value_heads=2, d_vocab=5, device="cpu"
)


def filled() -> Cache:
    """A cache as the model leaves it after a run over four positions of two rows."""
    cache = Cache.init_cache(CFG, "cpu", batch_size=2)
    for entry in cache:
        entry.append(torch.randn(2, 4, 2, 3), torch.randn(2, 4, 2, 3))
    cache.append_attention_mask(torch.ones(2, 4))
    cache.wrote({"length": 4})
    return cache


def test_a_new_cache_has_no_positions_and_the_models_dtype() -> None:
    cfg = HookedTransformerConfig(**CFG.to_dict() | {"dtype": torch.bfloat16})
    cache = Cache.init_cache(cfg, "cpu", batch_size=3)
    assert len(cache.entries) == 2
    assert cache[1].past_keys.shape == cache[1].past_values.shape == (3, 0, 2, 3)
    assert cache[0].past_keys.dtype == torch.bfloat16
    assert cache.previous_attention_mask.shape == (3, 0)
    assert cache.disagreement() is None


def test_append_returns_the_longer_tensors_and_keeps_them() -> None:
    cache = filled()
    keys, values = cache[0].append(torch.zeros(2, 1, 2, 3), torch.ones(2, 1, 2, 3))
    assert cache[0].past_keys is keys and keys.shape == (2, 5, 2, 3)
    assert cache[0].past_values is values and values[:, -1].eq(1).all()


def test_a_frozen_cache_returns_the_longer_tensors_and_keeps_the_old() -> None:
    cache = filled()
    cache.freeze()
    before = cache[0].past_keys
    keys, _ = cache[0].append(torch.zeros(2, 1, 2, 3), torch.ones(2, 1, 2, 3))
    mask = cache.append_attention_mask(torch.zeros(2, 1))
    assert keys.shape[1] == mask.shape[1] == 5
    assert cache[0].past_keys is before and cache.previous_attention_mask.shape[1] == 4
    cache.unfreeze()
    cache[0].append(torch.zeros(2, 1, 2, 3), torch.ones(2, 1, 2, 3))
    assert cache[0].past_keys.shape[1] == 5


def test_a_cache_as_a_run_left_it_agrees() -> None:
    assert filled().disagreement() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_agrees(copied: Callable[[Cache], Cache]) -> None:
    copy_of = copied(filled())
    assert copy_of.disagreement() is None
    assert copy_of.engine_cache == {"length": 4}


def replace_keys(cache: Cache) -> None:
    cache[1].past_keys = cache[1].past_keys.clone()


def edit_in_place(cache: Cache) -> None:
    cache[1].past_values[0, 0, 0, 0] += 1


def edit_data(cache: Cache) -> None:
    cache[1].past_keys.data[1] *= 2


def swap_positions(cache: Cache) -> None:
    cache[1].past_keys.data[:] = cache[1].past_keys.flip(1)


def append_by_hand(cache: Cache) -> None:
    cache[1].append(torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2, 3))


@pytest.mark.parametrize("edit", [replace_keys, edit_in_place, edit_data, swap_positions, append_by_hand])
def test_an_edit_is_noticed_with_its_layer(edit: Callable[[Cache], None]) -> None:
    cache = filled()
    edit(cache)
    assert "of layer 1 of the cache changed" in cache.disagreement()


def test_an_edit_of_inference_tensors_is_noticed() -> None:
    with torch.inference_mode():
        cache = filled()
        assert cache.disagreement() is None
        cache[1].past_keys[0] = 0
        assert "past_keys of layer 1" in cache.disagreement()


def test_layers_that_changed_places_are_noticed() -> None:
    cache = filled()
    cache.entries.reverse()
    assert "layer 0" in cache.disagreement()


def test_a_layer_taken_away_is_noticed() -> None:
    cache = filled()
    cache.entries.pop()
    assert cache.disagreement() == "the cache has 1 layers and was written with 2"


def test_a_cache_built_by_hand_is_noticed() -> None:
    other = filled()
    by_hand = Cache(entries=other.entries, previous_attention_mask=other.previous_attention_mask)
    assert "not written by a run" in by_hand.disagreement()


def test_freezing_a_single_layer_is_noticed() -> None:
    cache = filled()
    cache[0].frozen = True
    assert "frozen" in cache.disagreement()
