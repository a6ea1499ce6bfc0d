"""The key/value cache as a program handles it, against TransformerLens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_lens import HookedTransformerConfig as ReferenceConfig
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Reference

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from compat.tlens.past_key_value_caching import HookedTransformerKeyValueCache as Ours

SIZES: dict[str, Any] = dict(d_model=12, d_head=3, n_layers=2, n_ctx=7, n_heads=4, d_vocab=5, device="cpu")


def pair(**fields: Any) -> tuple[Ours, Reference]:
    """(ours, TransformerLens'), new, for two rows."""
    kinds = ((Ours, HookedTransformerConfig), (Reference, ReferenceConfig))
    return tuple(cache.init_cache(config(**SIZES | fields), "cpu", 2) for cache, config in kinds)


def assert_same(ours: Ours, theirs: Reference) -> None:
    assert ours.frozen == theirs.frozen
    assert ours.previous_attention_mask.equal(theirs.previous_attention_mask)
    assert ours.previous_attention_mask.dtype == theirs.previous_attention_mask.dtype
    for one, other in zip(ours, theirs, strict=True):
        assert one.frozen == other.frozen
        for name in ("past_keys", "past_values"):
            assert getattr(one, name).equal(getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


@pytest.mark.parametrize("fields", [{}, dict(n_key_value_heads=2), dict(dtype=torch.float16)], ids=str)
def test_a_cache_is_made_filled_and_frozen_alike(fields: dict[str, Any]) -> None:
    ours, theirs = pair(**fields)
    assert_same(ours, theirs)
    for action in (None, "freeze", "unfreeze"):
        if action:
            getattr(ours, action)()
            getattr(theirs, action)()
        for one, other in zip(ours, theirs, strict=True):
            new = [torch.randn(2, 3, *other.past_keys.shape[2:], dtype=other.past_keys.dtype) for _ in range(2)]
            returned, expected = one.append(*new), other.append(*new)
            assert returned[0].equal(expected[0]) and returned[1].equal(expected[1])
        mask = torch.ones(2, 3, dtype=torch.long)
        assert ours.append_attention_mask(mask).equal(theirs.append_attention_mask(mask))
        assert_same(ours, theirs)
