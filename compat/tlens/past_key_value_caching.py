"""Keys and values of earlier tokens, as TransformerLens keeps them, beside the engine's own cache of the same run.

The entries are what a program reads. What a run continues from is `engine_cache`, so entries that a program has put
there by hand cannot take part: `disagreement` says so, and the model refuses rather than ignore them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compat.tlens.HookedTransformerConfig import HookedTransformerConfig
from engine.checksum import checksum


@dataclass
class HookedTransformerKeyValueCacheEntry:
    """One layer's keys (before rotary) and values, `[batch, pos_so_far, n_key_value_heads, d_head]`."""

    past_keys: Tensor
    past_values: Tensor
    frozen: bool = False

    @classmethod
    def init_cache_entry(
        cls, cfg: HookedTransformerConfig, device: torch.device | str | None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCacheEntry:
        """An entry with no positions, in the model's dtype."""
        n_heads = cfg.n_heads if cfg.n_key_value_heads is None else cfg.n_key_value_heads
        shape = (batch_size, 0, n_heads, cfg.d_head)
        return cls(*(torch.empty(shape, device=device, dtype=cfg.dtype) for _ in range(2)))

    def append(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with new positions added, `[batch, pos, n_heads, d_head]`; kept unless frozen."""
        keys = torch.cat([self.past_keys, new_keys], dim=1)
        values = torch.cat([self.past_values, new_values], dim=1)
        if not self.frozen:
            self.past_keys, self.past_values = keys, values
        return keys, values


@dataclass
class HookedTransformerKeyValueCache:
    """A list of entries, one a layer, and the attention mask of the positions they hold, `[batch, pos_so_far]`.

    Frozen, it is read and not extended, so that many inputs can continue one prefix. engine_cache: the engine's own
    cache, which holds the same positions; None until a run has filled it.
    """

    entries: list[HookedTransformerKeyValueCacheEntry]
    previous_attention_mask: Tensor
    frozen: bool = False
    engine_cache: Any = field(default=None, init=False, repr=False, compare=False)
    _written: list[_Written] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def init_cache(
        cls, cfg: HookedTransformerConfig, device: torch.device | str | None, batch_size: int = 1
    ) -> HookedTransformerKeyValueCache:
        """A cache with no positions. device None means the model's; with `cfg.n_devices` > 1 layers are spread."""
        return cls(
            entries=[
                HookedTransformerKeyValueCacheEntry.init_cache_entry(cfg, _layer_device(layer, cfg, device), batch_size)
                for layer in range(cfg.n_layers)
            ],
            previous_attention_mask=torch.empty((batch_size, 0), device=device, dtype=torch.int),
        )

    def freeze(self) -> None:
        """Keep the cache as it is during later runs."""
        self._set_frozen(True)

    def unfreeze(self) -> None:
        """Let later runs extend the cache."""
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        for part in (self, *self.entries):
            part.frozen = frozen

    def append_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask `[batch, pos_so_far + new]` with new positions `[batch, new]` added; kept unless frozen."""
        mask = torch.cat([self.previous_attention_mask, attention_mask.to(self.previous_attention_mask.device)], dim=-1)
        if not self.frozen:
            self.previous_attention_mask = mask
        return mask

    def __getitem__(self, idx: int) -> HookedTransformerKeyValueCacheEntry:
        return self.entries[idx]

    def wrote(self, engine_cache: Any) -> None:
        """Remember that the entries now say what `engine_cache` holds. For the model, after it has extended both."""
        self.engine_cache = engine_cache
        self._written = [_Written.of(entry) for entry in self.entries]

    def disagreement(self) -> str | None:
        """Why the engine's cache is not what the entries say, as a sentence; None if it is, or if both are empty."""
        if any(entry.frozen != self.frozen for entry in self.entries):
            return "some layers of the cache are frozen and others are not; freeze() or unfreeze() the whole cache"
        if self.engine_cache is None:
            if all(entry.past_keys.shape[1] == 0 for entry in self.entries):
                return None
            return "the cache's keys and values were not written by a run of this model"
        if len(self.entries) != len(self._written):
            return f"the cache has {len(self.entries)} layers and was written with {len(self._written)}"
        for layer, (entry, written) in enumerate(zip(self.entries, self._written, strict=True)):
            if changed := written.changed(entry):
                return f"{changed} of layer {layer} of the cache changed after the run that wrote it"
        return None


@dataclass(frozen=True)
class _Written:
    """An entry as a run left it: the very tensors, and a checksum of each, since an edit in place keeps the tensor.

    `_version` would not do: inference tensors have none.
    """

    tensors: dict[str, Tensor]
    checksums: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, entry: HookedTransformerKeyValueCacheEntry) -> _Written:
        tensors = {"past_keys": entry.past_keys, "past_values": entry.past_values}
        return cls(tensors, {name: checksum(tensor) for name, tensor in tensors.items()})

    def changed(self, entry: HookedTransformerKeyValueCacheEntry) -> str | None:
        for name, tensor in self.tensors.items():
            now = getattr(entry, name)
            if now is not tensor or checksum(now) != self.checksums[name]:
                return name
        return None


def _layer_device(layer: int, cfg: HookedTransformerConfig, device: torch.device | str | None) -> torch.device:
    first = torch.device(cfg.device if device is None else device)
    if first.type == "cpu":
        return first
    return torch.device(first.type, (first.index or 0) + layer * cfg.n_devices // cfg.n_layers)


TransformerLensKeyValueCache = HookedTransformerKeyValueCache
TransformerLensKeyValueCacheEntry = HookedTransformerKeyValueCacheEntry
