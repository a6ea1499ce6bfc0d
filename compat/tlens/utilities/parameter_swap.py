"""Other values in a parameter for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def temporarily_swap_parameter(parameter: nn.Parameter, new_value: torch.Tensor) -> Iterator[nn.Parameter]:
    """`with temporarily_swap_parameter(p, values)`: `p` holds `values`, and its own again afterwards, come what may.

    The parameter object stays the same, so ties, optimizers and hooks hold. TypeError unless given a Parameter and a
    plain tensor; ValueError when shape or dtype differ.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"parameter must be a torch.nn.Parameter, got {type(parameter).__name__}")
    if isinstance(new_value, nn.Parameter) or not isinstance(new_value, torch.Tensor):
        raise TypeError(f"new_value must be a plain torch.Tensor, got {type(new_value).__name__}")
    for what in ("shape", "dtype"):
        expected, got = getattr(parameter, what), getattr(new_value, what)
        if expected != got:
            raise ValueError(f"new_value has {what} {got}, the parameter has {expected}")
    own = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.copy_(new_value)
        yield parameter
    finally:
        with torch.no_grad():
            parameter.copy_(own)
