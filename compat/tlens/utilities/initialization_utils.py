"""Weight initialisations for weights stored as `[d_in, d_out]` and `[head, d_model, d_head]`, unlike torch's.

All fill `param` in place and return it. Formulas: Glorot & Bengio 2010 (xavier), He et al. 2015 (kaiming).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

NonlinearityType = Literal[
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "sigmoid",
    "tanh",
    "relu",
    "leaky_relu",
    "selu",
]


def calc_fan_in_and_fan_out(tensor: torch.Tensor) -> tuple[int, int]:
    """(fan in, fan out) of a bias, a `[d_in, d_out]` matrix or a `[head, d_model, d_head]` weight; else ValueError."""
    match tuple(tensor.shape):
        case (n_out,):
            return 1, n_out
        case (n_in, n_out):
            return n_in, n_out
        case (n_heads, n_in, n_out):
            return n_in, n_heads * n_out
        case shape:
            raise ValueError(f"no fan in and fan out for a tensor of shape {shape}: it must have one to three axes")


def init_xavier_uniform_(param: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out))."""
    bound = gain * math.sqrt(6.0 / sum(calc_fan_in_and_fan_out(param)))
    return nn.init.uniform_(param, -bound, bound)


def init_xavier_normal_(param: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    """Normal with standard deviation gain * sqrt(2 / (fan_in + fan_out))."""
    return nn.init.normal_(param, mean=0.0, std=gain * math.sqrt(2.0 / sum(calc_fan_in_and_fan_out(param))))


def init_kaiming_uniform_(
    param: torch.Tensor,
    a: float = 0,
    nonlinearity: NonlinearityType = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
) -> torch.Tensor:
    """Uniform in +-gain * g * sqrt(3 / fan), g being torch's gain for the nonlinearity (with its parameter `a`)."""
    bound = gain * nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3.0 / _fan(param, mode))
    return nn.init.uniform_(param, -bound, bound)


def init_kaiming_normal_(
    param: torch.Tensor,
    a: float = 0,
    nonlinearity: NonlinearityType = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
) -> torch.Tensor:
    """Normal with standard deviation gain * g * sqrt(1 / fan), g being torch's gain for the nonlinearity."""
    std = gain * nn.init.calculate_gain(nonlinearity, a) * math.sqrt(1.0 / _fan(param, mode))
    return nn.init.normal_(param, mean=0.0, std=std)


def _fan(param: torch.Tensor, mode: str) -> int:
    fan_in, fan_out = calc_fan_in_and_fan_out(param)
    return fan_in if mode == "fan_in" else fan_out
