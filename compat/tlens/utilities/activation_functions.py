"""MLP activation functions by the names configs use, and the soft cap. All keep the shape and dtype of their input."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

ActivationFunction = Callable[..., torch.Tensor]
Scalar = float | torch.Tensor

SOFTCAP_DISABLED: float = -1.0


def gelu_new(input: torch.Tensor) -> torch.Tensor:
    """GPT-2's tanh approximation of GELU (Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415)."""
    inner = math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))
    return 0.5 * input * (1.0 + torch.tanh(inner))


def gelu_fast(input: torch.Tensor) -> torch.Tensor:
    """The same approximation factored as GPT-J's code has it; it rounds differently from `gelu_new`."""
    return 0.5 * input * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))


def gelu_pytorch_tanh(input: torch.Tensor) -> torch.Tensor:
    """PyTorch's own tanh approximation of GELU."""
    return F.gelu(input, approximate="tanh")


def solu(input: torch.Tensor) -> torch.Tensor:
    """x * softmax(x) over the last axis (https://transformer-circuits.pub/2022/solu). The LayerNorm is the MLP's."""
    return input * F.softmax(input, dim=-1)


def relu2(input: torch.Tensor) -> torch.Tensor:
    """relu(x) squared."""
    positive = F.relu(input)
    return positive * positive


def _xielu(x: torch.Tensor, alpha_p: Scalar, alpha_n: Scalar, beta: Scalar, eps: torch.Tensor) -> torch.Tensor:
    above = alpha_p * x * x + beta * x
    below = (torch.expm1(torch.min(x, eps)) - x) * alpha_n + beta * x
    return torch.where(x > 0, above, below)


def xielu(input: torch.Tensor) -> torch.Tensor:
    """xIELU with its published starting parameters, fixed (https://arxiv.org/abs/2411.13010)."""
    return _xielu(input, alpha_p=0.8, alpha_n=0.8, beta=0.5, eps=torch.tensor(-1e-6))


class XIELU(nn.Module):
    """xIELU with trainable alphas, kept as the inverse of softplus like Hugging Face's XIELUActivation."""

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta_init: float = 0.5, eps: float = -1e-6
    ) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.log(torch.expm1(torch.tensor(alpha_p_init))))
        self.alpha_n = nn.Parameter(torch.log(torch.expm1(torch.tensor(alpha_n_init - beta_init))))
        self.register_buffer("beta", torch.tensor(beta_init))
        self.register_buffer("eps", torch.tensor(eps))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _xielu(input, F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n), self.beta, self.eps)


SUPPORTED_ACTIVATIONS: dict[str, ActivationFunction] = {
    "solu": solu,
    "solu_ln": solu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_pytorch_tanh,
    "xielu": xielu,
    "relu2": relu2,
}


def softcap_enabled(cap: float | None) -> bool:
    """Whether `cap` caps anything: None, 0 and negative values mean no cap."""
    return cap is not None and cap > 0


def apply_softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap), or `x` itself when there is no cap."""
    return cap * torch.tanh(x / cap) if softcap_enabled(cap) else x
