"""The device an engine runs on. The only module that names one."""

from __future__ import annotations

import os
import resource
import sys

import torch

_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def default_device() -> torch.device:
    """The accelerator of this process if torch sees one, else the CPU."""
    if torch.accelerator.is_available():
        return torch.device(torch.accelerator.current_accelerator())  # type: ignore[arg-type]
    return torch.device("cpu")


def own_device(name: str | None = None) -> torch.device:
    """The device of this rank: its own accelerator where there is one and the CPU is not asked for by ``name``.

    Raises:
        ValueError: more ranks on this machine, by ``LOCAL_RANK``, than accelerators.
    """
    device = torch.device(name) if name is not None else default_device()
    if device.type == "cpu":
        return device
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if index >= count:
        raise ValueError(
            f"rank {index} of this machine needs an accelerator of its own, and there are {count}: use a layout of at "
            f"most {count} ranks"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def collectives_backends(device: torch.device) -> str:
    """Backends of a process group: those of an accelerator beside those of the CPU, which batches travel by."""
    cpu, chosen = collectives_backend(torch.device("cpu")), collectives_backend(device)
    return cpu if device.type == "cpu" else f"cpu:{cpu},{device.type}:{chosen}"


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
