"""Which device to use, and moving a model together with its config."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from compat.tlens.utilities.multi_gpu import (  # noqa: F401  2.x code imports these from here
    AvailableDeviceMemory,
    calculate_available_device_cuda_memory,
    determine_available_memory_for_available_devices,
    get_best_available_cuda_device,
    get_best_available_device,
    get_device_for_block_index,
    sort_devices_based_on_available_memory,
)

_MPS_OPT_IN = "TRANSFORMERLENS_ALLOW_MPS"
_MPS_WRONG_LINEAR = (2, 8)  # https://github.com/pytorch/pytorch/issues/161640
_warned: set[str] = set()


def _mps_allowed() -> bool:
    return os.environ.get(_MPS_OPT_IN) == "1"


def get_device() -> str:
    """"cuda" where there is one, else "mps" if TRANSFORMERLENS_ALLOW_MPS=1 says so, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available() and torch.backends.mps.is_built():
        if _mps_allowed():
            return "mps"
        logging.info("an MPS device is here but is not chosen by itself; set %s=1 to use it", _MPS_OPT_IN)
    return "cpu"


def warn_if_mps(device: str | torch.device) -> None:
    """Warn, once each, that MPS can be silently wrong. The opt-in hides that, unless this torch is known to be."""
    if (device.type if isinstance(device, torch.device) else device) != "mps":
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version == _MPS_WRONG_LINEAR:
        _warn_once(f"torch {torch.__version__} multiplies non-contiguous tensors wrongly on MPS; use 2.9 or later")
    if not _mps_allowed():
        _warn_once(f"MPS results of torch {torch.__version__} can be silently wrong; {_MPS_OPT_IN}=1 hides this")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=3)


@runtime_checkable
class ModelWithCfg(Protocol):
    """A model with a config that can be moved."""

    cfg: Any

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def to(self, device_or_dtype: torch.device | str | torch.dtype) -> Any: ...


def move_to_and_update_config(
    model: ModelWithCfg, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Any:
    """`nn.Module.to`, not the model's own `to`, with `cfg.device` or `cfg.dtype` set to match; returns the model."""
    if isinstance(device_or_dtype, torch.dtype):
        if hasattr(model.cfg, "dtype"):
            model.cfg.dtype = device_or_dtype
        news = f"Changing model dtype to {device_or_dtype}"
    else:
        warn_if_mps(device_or_dtype)
        model.cfg.device = device_or_dtype.type if isinstance(device_or_dtype, torch.device) else device_or_dtype
        news = f"Moving model to device:  {model.cfg.device}"
    if print_details:
        print(news)
    return nn.Module.to(model, device_or_dtype)
