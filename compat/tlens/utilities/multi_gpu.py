"""Which of several GPUs to use."""

from __future__ import annotations

from typing import Any

import torch

from compat.tlens.errors import require

AvailableDeviceMemory = list[tuple[int, int]]  # (device index, free bytes)
MaxMemory = dict[str | int, str | int]

MIXED_CPU_GPU_ERROR = (
    "this device_map puts some modules on a CPU and some on a GPU, which leaves the CPU ones without weights between "
    "their calls; use one kind of device"
)


def calculate_available_device_cuda_memory(i: int) -> int:
    """Bytes of GPU `i` that torch has not allocated."""
    return torch.cuda.get_device_properties(i).total_memory - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> AvailableDeviceMemory:
    """(index, free bytes) of the first `max_devices` GPUs."""
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(max_devices)]


def sort_devices_based_on_available_memory(devices: AvailableDeviceMemory) -> AvailableDeviceMemory:
    """The same pairs, most free memory first."""
    return sorted(devices, key=lambda device: device[1], reverse=True)


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with most free memory among the first `max_devices`; OSError without any."""
    n_devices = torch.cuda.device_count() if max_devices is None else max_devices
    devices = sort_devices_based_on_available_memory(determine_available_memory_for_available_devices(n_devices))
    if not devices:
        raise OSError("a CUDA device was asked for, and there is none")
    return torch.device("cuda", devices[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """`cfg.device`, or the GPU with most free memory when the config spreads over several."""
    require(cfg.device is not None, "cfg.device is not set")
    device = torch.device(cfg.device)
    if device.type == "cuda" and cfg.n_devices > 1:
        return get_best_available_cuda_device(cfg.n_devices)
    return device


def get_device_for_block_index(index: int, cfg: Any, device: torch.device | str | None = None) -> torch.device:
    """The device of layer `index`, `cfg.n_layers` layers being spread over `cfg.n_devices` devices from `device` on."""
    require(cfg.device is not None, "cfg.device is not set")
    first = torch.device(cfg.device if device is None else device)
    if first.type == "cpu":
        return first
    return torch.device(first.type, (first.index or 0) + index * cfg.n_devices // cfg.n_layers)


def is_mixed_cpu_gpu(values: Any) -> bool:
    """Whether a device map's values name both a CPU and a GPU (an int is a GPU's index)."""
    names = ["cuda" if isinstance(value, int) else str(value).lower() for value in values]
    return "cpu" in names and any(name.startswith("cuda") for name in names)


def resolve_device_map(
    n_devices: int | None,
    device_map: str | dict[str, str | int] | None,
    device: str | torch.device | None,
    max_memory: MaxMemory | None = None,
) -> tuple[str | dict[str, str | int] | None, MaxMemory | None]:
    """(device_map, max_memory) for Hugging Face's `from_pretrained`.

    An explicit map passes through; several devices become "balanced" within the memory now free on each; one device is
    (None, max_memory). ValueError for a map beside a device, disk offload, a map mixing CPU and GPU, or too few GPUs.
    """
    if device_map is not None:
        if device is not None:
            raise ValueError("give either device or device_map, not both")
        if isinstance(device_map, dict):
            _check_device_map(device_map)
        return device_map, max_memory
    if n_devices is None or n_devices <= 1:
        return None, max_memory
    n_present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n_present < n_devices:
        raise ValueError(f"n_devices={n_devices}, but {n_present} CUDA devices are present")
    if max_memory is None:
        return "balanced", {i: torch.cuda.mem_get_info(i)[0] for i in range(n_devices)}
    return "balanced", dict(max_memory)


def _check_device_map(device_map: dict[str, str | int]) -> None:
    for module, target in device_map.items():
        if str(target).lower() == "disk":
            raise ValueError(f"device_map[{module!r}] is {target!r}: weights on disk cannot be read or hooked")
    if is_mixed_cpu_gpu(device_map.values()):
        raise ValueError(MIXED_CPU_GPU_ERROR)


def find_embedding_device(hf_model: Any) -> torch.device | None:
    """Where a model spread over devices takes its token ids: its input embedding's device. None for a model on one."""
    device_map = getattr(hf_model, "hf_device_map", None)
    if not device_map:
        return None
    try:
        return next(hf_model.get_input_embeddings().parameters()).device
    except (AttributeError, NotImplementedError, StopIteration):  # no embedding to ask: the first module of the map
        first = next(iter(device_map.values()))
        return torch.device("cuda", first) if isinstance(first, int) else torch.device(first)


def count_unique_devices(hf_model: Any) -> int:
    """How many devices the model is spread over, 1 without a device map."""
    return len(set((getattr(hf_model, "hf_device_map", None) or {"": "one"}).values()))
