"""How far a key-value cache reaches."""

from __future__ import annotations

from typing import Any


def get_pos_offset(past_kv_cache: Any | None, batch_size: int) -> int:
    """Number of positions already in the cache, 0 for None. Keys are `[batch, pos, head, d_head]`."""
    return 0 if past_kv_cache is None else past_kv_cache.entries[0].past_keys.shape[1]
