"""Which implementation of an op runs: Triton on accelerators, C++ on the CPU, else plain torch."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from archon_kernels import extension

Op = TypeVar("Op")

NAMES = ("triton", "cpp", "reference")
VARIABLE = "ARCHON_KERNELS"


def choose(table: Mapping[str, Op], device: torch.device) -> Op:
    """The implementation of an op for tensors on ``device``.

    The environment variable ``ARCHON_KERNELS`` names the one to use; an op that has none of that name runs its
    reference.

    Args:
        table: from names in ``NAMES`` to what runs; ``reference`` is always among them.

    Raises:
        ValueError: ``ARCHON_KERNELS`` is no name of an implementation, or names one that cannot run on the device.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        fast = "cpp" if device.type == "cpu" else "triton"
        return table[fast if fast in table and _runs(fast, device) else "reference"]
    if wanted not in NAMES:
        raise ValueError(f"{VARIABLE}={wanted!r}: choose one of {', '.join(NAMES)}, or unset it")
    if wanted not in table:
        return table["reference"]
    if not _runs(wanted, device):
        raise ValueError(f"{VARIABLE}={wanted}: {_needs(wanted)}; the tensors are on {device.type}")
    return table[wanted]


def implementations(
    reference: Callable[..., Any], *, cpp: str | None = None, triton: str | None = None
) -> dict[str, Callable[..., Any]]:
    """What ``choose`` chooses from; the fast ones are looked up when they are called.

    Args:
        reference: in plain torch.
        cpp: name of the C++ op.
        triton: ``module.function`` in ``archon_kernels.triton_ops``; importing Triton takes time.
    """
    found = {"reference": reference}
    if cpp is not None:
        found["cpp"] = lambda *args: getattr(torch.ops.archon_cpp, cpp)(*args)
    if triton is not None:
        module, _, name = triton.partition(".")
        found["triton"] = lambda *args: getattr(importlib.import_module(f"archon_kernels.triton_ops.{module}"), name)(
            *args
        )
    return found


def _runs(name: str, device: torch.device) -> bool:
    if name == "cpp":
        return device.type == "cpu" and extension.load()
    if name == "triton":
        return (device.type != "cpu" or interpreting()) and _has_triton()
    return True


def _needs(name: str) -> str:
    if name == "cpp":
        return f"the C++ ops run on the CPU, once built ({extension.problem() or 'they are built'})"
    return "Triton kernels run on accelerators, or anywhere with TRITON_INTERPRET=1 set before Triton is imported"


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
