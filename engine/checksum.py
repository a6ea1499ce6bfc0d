"""A checksum of a tensor's bits, to notice an edit however it was made (`.data` edits leave `_version` as it was)."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Sums of the bits by row and by column, weighted by place with odd weights: any one changed value shows (mod 2^64),
    and so does a reordering, unless it keeps every row's and every column's sum."""
    if tensor.numel() == 0:
        return 0, 0
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    bits = bits.view(-1, bits.shape[-1] if bits.dim() else 1)
    return tuple((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum().item()
                 for sums in (bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)))
