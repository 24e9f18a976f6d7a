"""Triton implementations, one module per op; ``archon_kernels.dispatch`` imports them when they run.

A module also lists how its kernels are launched, as ``COMPILED``, so that they can be compiled ahead of time for
devices that are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """One way that a kernel is launched.

    Attributes:
        kernel: the ``triton.jit`` function.
        signature: type of each argument in Triton's spelling: ``*bf16``, ``*fp32``, ``*i64``, ``i32``, ``fp32``, or
            ``constexpr``.
        constants: value of each ``constexpr``.
        num_warps, num_stages: launch options.
        variant: what tells this entry from others of the same kernel.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    variant: str = ""
