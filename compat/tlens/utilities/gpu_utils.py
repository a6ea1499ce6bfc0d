"""GPU memory, for a quick look."""

from __future__ import annotations

import numpy as np
import torch


def print_gpu_mem(step_name: str = "") -> None:
    """Print the memory torch holds on the current GPU, in GiB (2**30 bytes)."""
    print(f"{step_name} ~ {np.round(torch.cuda.memory_allocated() / 2**30, 2)} GiB allocated on GPU.")
