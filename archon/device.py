"""The device an engine runs on. The only module that names one."""

from __future__ import annotations

import resource
import sys

import torch

_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def default_device() -> torch.device:
    """The accelerator of this process if torch sees one, else the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    return torch.device("cpu")


def collectives_backend(device: torch.device) -> str:
    """Name of torch's collectives backend for a device.

    Raises:
        ValueError: a device type that has none here.
    """
    try:
        return _COLLECTIVES[device.type]
    except KeyError:
        known = ", ".join(_COLLECTIVES)
        raise ValueError(f"no collectives for device {device.type!r}; use one of {known}") from None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on an accelerator, resident on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
